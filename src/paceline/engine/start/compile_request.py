"""What the process `compile_kernels` receives and prints, as JSON."""

import json
from dataclasses import asdict, dataclass

from paceline.core.config import EngineConfig, from_mapping
from paceline.kernels.gpu_model import GpuModel


@dataclass(frozen=True, slots=True)
class CompileRequest:
    config: EngineConfig
    """Settings of the engine, with the draft resolved."""
    gpu: GpuModel
    processes: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "CompileRequest":
        fields = json.loads(text)
        return CompileRequest(
            from_mapping(EngineConfig, fields["config"]), GpuModel(**fields["gpu"]), fields["processes"]
        )


@dataclass(frozen=True, slots=True)
class CompileReport:
    kernels: int
    compiled: int
    """Kernels that were not in the cache folder."""
    processes: int
    listed_seconds: float
    """Time until all kernels were known."""
    seconds: float
    has_launchers: bool
    """Whether the code that launches the kernels was compiled too."""

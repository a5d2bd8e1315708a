"""The folder of compiled kernels, and which engines it is complete for."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidConfig
from paceline.kernels.gpu_model import GpuModel

VARIABLE = "TRITON_CACHE_DIR"
_SOURCES = ("kernels", "models", "engine")
"""Packages whose code decides which kernels an engine launches."""
_NOT_RELEVANT = ("kernel_cache", "kv_disk", "kv_disk_bytes", "kv_host_bytes", "audit_fraction", "device")
"""Settings that change no kernel."""


@dataclass(frozen=True, slots=True)
class KernelCache:
    folder: Path

    @staticmethod
    def current() -> "KernelCache":
        """The folder that Triton uses in this process and in its children."""
        home = os.environ.get("TRITON_HOME") or str(Path.home())
        return KernelCache(Path(os.environ.get(VARIABLE) or Path(home) / ".triton" / "cache"))

    def use(self) -> None:
        """Make it the folder of this process and of its children. Raises `InvalidConfig` if it cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidConfig(f"kernel_cache {self.folder} cannot be created: {error.strerror}") from None
        folder = self.folder.resolve()
        if not os.access(folder, os.W_OK):
            raise InvalidConfig(f"kernel_cache {folder} is not writable: change its owner, or choose another folder")
        KernelCache(folder)._adopt()
        os.environ[VARIABLE] = str(folder)

    def is_complete(self, key: str) -> bool:
        """Whether all kernels of the engine with this key are in the folder."""
        return self._marker(key).is_file()

    def mark_complete(self, key: str, num_kernels: int) -> None:
        marker = self._marker(key)
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text(json.dumps({"kernels": num_kernels, "folder": str(self.folder)}))

    def _marker(self, key: str) -> Path:
        return self.folder / "paceline" / f"{key}.json"

    def _adopt(self) -> None:
        """Correct the paths in a folder that was copied from another place. Triton stores absolute ones."""
        markers = [(path, json.loads(path.read_text())) for path in self.folder.glob("paceline/*.json")]
        moved = [(path, marker) for path, marker in markers if marker["folder"] != str(self.folder)]
        if not moved:
            return
        for path in self.folder.glob("*/__grp__*.json"):
            group = json.loads(path.read_text())
            group["child_paths"] = {name: str(path.parent / name) for name in group["child_paths"]}
            _replace(path, group)
        for path, marker in moved:
            _replace(path, {**marker, "folder": str(self.folder)})


def engine_key(config: EngineConfig, gpu: GpuModel, models: str) -> str:
    """A key that differs for engines that may launch different kernels. `models` describes the shapes of the models."""
    settings = {name: value for name, value in asdict(config).items() if name not in _NOT_RELEVANT}
    facts = json.dumps([settings, gpu.name, gpu.capability, models, _versions()], sort_keys=True, default=str)
    digest = hashlib.sha256(facts.encode())
    package = Path(__file__).parents[2]
    for source in sorted(path for name in _SOURCES for path in (package / name).rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _versions() -> list[str]:
    found = []
    for package in ("torch", "triton"):
        try:
            found.append(version(package))
        except PackageNotFoundError:
            found.append("none")
    return found


def _replace(path: Path, content: object) -> None:
    """Write a file that other processes may be reading."""
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(content))
    draft.replace(path)

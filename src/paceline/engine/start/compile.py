"""Compilation of an engine's kernels in other processes, while this process reads the weights.

`CompileRequest` and `CompileReport` are what the process `compile_child` receives and prints, as JSON. `KernelCache` is the
folder of compiled kernels, and it records which engines the folder is complete for.
"""

import hashlib
import json
import logging
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from paceline.core.child import PIPE, STDOUT, ChildProcess
from paceline.core.config import EngineConfig, from_mapping
from paceline.core.errors import InvalidConfig, PacelineError
from paceline.core.machine import log_phase, usable_cores
from paceline.kernels.formats.layout import META, GpuModel, gpu_model
from paceline.model_files.hub import pick_draft
from paceline.models.loading import open_checkpoint

logger = logging.getLogger(__name__)


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


SPARE_CORES = 2
"""Cores left for the process that reads the weights."""


class KernelCompilation:
    """A running compilation. There is none on a CPU, and none if the cache folder is known to be complete for this engine."""

    def __init__(self, process: ChildProcess | None, cache: KernelCache, key: str) -> None:
        self._process, self._cache, self._key = process, cache, key
        self._began = time.perf_counter()

    @classmethod
    def start(cls, config: EngineConfig, device: torch.device) -> Self:
        """Begin to compile the kernels of the engine of this configuration."""
        cache = KernelCache.current()
        if device.type != "cuda" or config.tensor_parallel_size > 1:
            return cls(None, cache, "")
        gpu = gpu_model(device)
        assert gpu is not None
        key, request = request_for(config, gpu)
        if cache.is_complete(key):
            logger.info("kernels are in %s", cache.folder)
            return cls(None, cache, key)
        return cls(run_compiler(request), cache, key)

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def wait(self) -> CompileReport | None:
        """Block until all kernels are compiled. An error is logged: the warm-up then compiles what is missing, one by one."""
        if self._process is None:
            return None
        before = time.perf_counter()
        report, self._process = read_report(self._process), None
        if report is None:
            return None
        if report.has_launchers:
            self._cache.mark_complete(self._key, report.kernels)
        note = (
            f"{report.kernels} kernels, {report.kernels - report.compiled} in the cache, {report.processes} processes; "
            f"all known after {report.listed_seconds:.1f} s, waited {time.perf_counter() - before:.1f} s"
        )
        log_phase("compile kernels", time.perf_counter() - self._began, note)
        return report

    def close(self) -> None:
        """End the processes that are still running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.close()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def request_for(config: EngineConfig, gpu: GpuModel, processes: int | None = None) -> tuple[str, CompileRequest]:
    """(key of the engine in the cache folder, what to compile)."""
    draft = pick_draft(config.draft, config.model)
    on_meta = replace(
        config,
        device=META.type,
        draft=draft or "none",
        kv_disk=None,
        kv_host_bytes=None,
        kernel_cache=None,
        speculation=replace(config.speculation, method=None),  # all proposers are warmed up
    )
    models = " ".join(_shapes(name) for name in (config.model, draft) if name is not None)
    request = CompileRequest(on_meta, gpu, processes or max(1, usable_cores() - SPARE_CORES))
    return engine_key(on_meta, gpu, models), request


def run_compiler(request: CompileRequest) -> ChildProcess:
    """A process that compiles what is requested, without a GPU. It ends with the process that started it."""
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "0",
        "TRITON_STORE_BINARY_ONLY": "1",  # later starts read less
        "OMP_NUM_THREADS": "1",
    }
    return ChildProcess(
        [sys.executable, "-W", "ignore", "-m", "paceline.engine.start.compile_child", request.to_json()],
        stdout=PIPE,
        stderr=STDOUT,
        environment=environment,
    )


def read_report(process: ChildProcess) -> CompileReport | None:
    """Wait for the end of `run_compiler`. None if it failed, which is logged."""
    try:
        out = process.read_all().decode(errors="replace")
        code = process.wait()  # before standard input is closed: the process ends with it
    finally:
        process.close()
    if code:
        logger.warning("the kernels could not be compiled ahead: %s", out.strip()[-2000:])
        return None
    return CompileReport(**json.loads(out.splitlines()[-1]))


def _shapes(name: str) -> str:
    """A description of the model's shapes; its name if it cannot be opened as a whole model."""
    try:
        return repr(open_checkpoint(name).config)
    except PacelineError:
        return name

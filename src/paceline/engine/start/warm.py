"""Compilation of an engine's kernels into a folder, on a machine with or without a GPU."""

from importlib.util import find_spec
from pathlib import Path

from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidConfig, PacelineError
from paceline.core.machine import usable_cores
from paceline.engine.start.compile_request import CompileReport
from paceline.engine.start.kernel_cache import KernelCache
from paceline.engine.start.kernel_compilation import read_report, request_for, run_compiler
from paceline.kernels.gpu_model import GpuModel

GPUS = {
    "a100": GpuModel("NVIDIA A100-SXM4-80GB", 80, 108, 85_000_000_000),
    "h100": GpuModel("NVIDIA H100 80GB HBM3", 90, 132, 85_000_000_000),
    "h200": GpuModel("NVIDIA H200", 90, 132, 150_000_000_000),
}


class CompilationFailed(PacelineError):
    """The compiler process failed; its output is in the log."""


def compile_into(folder: Path, config: EngineConfig, gpu: str | None = None) -> CompileReport:
    """Compile all kernels of this engine for `gpu`, by default the GPU of this machine. Uses all cores."""
    model = _gpu_model(gpu)
    if find_spec("triton") is None:
        raise InvalidConfig("compiling GPU kernels needs the package `triton`: pip install triton")
    KernelCache(folder).use()
    key, request = request_for(config, model, usable_cores())
    report = read_report(run_compiler(request))
    if report is None:
        raise CompilationFailed("the kernels could not be compiled: see the log")
    if report.has_launchers:
        KernelCache.current().mark_complete(key, report.kernels)
    return report


def _gpu_model(name: str | None) -> GpuModel:
    if name is not None:
        if name.lower() not in GPUS:
            raise InvalidConfig(f"--gpu {name!r} is unknown: choose from {', '.join(GPUS)}")
        return GPUS[name.lower()]
    import torch

    from paceline.kernels.gpu_model import gpu_model

    if not torch.cuda.is_available():
        raise InvalidConfig(f"this machine has no GPU: name the one to compile for, --gpu {' or '.join(GPUS)}")
    model = gpu_model(torch.device("cuda"))
    assert model is not None
    return model

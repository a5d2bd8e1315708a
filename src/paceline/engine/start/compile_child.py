"""Compiles all kernels of an engine in parallel: `python -m paceline.engine.start.compile_child REQUEST`.

The process builds the engine on the device `meta` and warms it up. Nothing is computed and no weights are read: every launch
only names the kernel that a GPU would need. Forked processes compile these kernels meanwhile, one for each core.

`compile_into` compiles an engine's kernels into a folder, on a machine with or without a GPU.
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidConfig, PacelineError
from paceline.core.machine import usable_cores
from paceline.engine.start.compile import (
    CompileReport,
    CompileRequest,
    KernelCache,
    read_report,
    request_for,
    run_compiler,
)
from paceline.kernels.formats.layout import GpuModel, compile_for


def compile_all(request: CompileRequest) -> CompileReport:
    """Compile every kernel that the warm-up of the engine launches. Call it once, in a process that has imported no kernel."""
    began = time.perf_counter()
    compile_for(request.gpu)
    # The imports come before the fork, so that the forked processes share them
    from paceline.engine.graph import GraphExecutor  # noqa: F401
    from paceline.engine.start.build import build_engine
    from paceline.kernels.gpu.compilation import (
        KernelSpec,
        compile_again,
        compile_kernel,
        has_launchers,
        record_kernels,
        target_gpu,
    )

    target_gpu(request.gpu.capability)
    pending: dict[KernelSpec, Future[bool]] = {}
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(request.processes, mp_context=context, initializer=compile_again) as pool:
        pool.submit(int).result()  # starts the processes
        threading.Thread(target=_end_with_parent, daemon=True).start()
        record_kernels(lambda spec: pending.setdefault(spec, pool.submit(compile_kernel, spec)))
        engine = build_engine(request.config)
        engine.warm_up()
        listed = time.perf_counter() - began
        compiled = sum(future.result() for future in pending.values())
    seconds = time.perf_counter() - began
    return CompileReport(len(pending), compiled, request.processes, listed, seconds, has_launchers())


def _end_with_parent() -> None:
    """End this process and the forked ones when the parent is gone: it holds the other end of standard input."""
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    report = compile_all(CompileRequest.from_json(arguments[0]))
    print(json.dumps(asdict(report)), flush=True)
    return 0


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

    from paceline.kernels.formats.layout import gpu_model

    if not torch.cuda.is_available():
        raise InvalidConfig(f"this machine has no GPU: name the one to compile for, --gpu {' or '.join(GPUS)}")
    model = gpu_model(torch.device("cuda"))
    assert model is not None
    return model


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Compiles all kernels of an engine in parallel: `python -m paceline.engine.start.compile_kernels REQUEST`.

The process builds the engine on the device `meta` and warms it up. Nothing is computed and no weights are read: every launch
only names the kernel that a GPU would need. Forked processes compile these kernels meanwhile, one for each core.
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

from paceline.engine.start.compile_request import CompileReport, CompileRequest
from paceline.kernels.gpu_model import compile_for


def compile_all(request: CompileRequest) -> CompileReport:
    """Compile every kernel that the warm-up of the engine launches. Call it once, in a process that has imported no kernel."""
    began = time.perf_counter()
    compile_for(request.gpu)
    # The imports come before the fork, so that the forked processes share them
    from paceline.engine.build import build_engine
    from paceline.engine.executors.graph import executor  # noqa: F401
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
        engine.hooks.finish_idle_work()
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

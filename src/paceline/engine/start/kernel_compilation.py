"""Compilation of an engine's kernels in other processes, while this process reads the weights."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch

from paceline.core.config import EngineConfig
from paceline.core.errors import PacelineError
from paceline.core.machine import usable_cores
from paceline.core.timeline import log_phase
from paceline.engine.start.compile_request import CompileReport, CompileRequest
from paceline.engine.start.kernel_cache import KernelCache, engine_key
from paceline.kernels.gpu_model import META, GpuModel, gpu_model
from paceline.models.loading.hub import pick_draft
from paceline.models.loading.load import open_checkpoint

logger = logging.getLogger(__name__)

SPARE_CORES = 2
"""Cores left for the process that reads the weights."""


class KernelCompilation:
    """A running compilation, or none: on a CPU, and if the cache folder is known to be complete for this engine."""

    def __init__(self, process: "subprocess.Popen[str] | None", cache: KernelCache, key: str) -> None:
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
            with self._process, suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
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


def run_compiler(request: CompileRequest) -> "subprocess.Popen[str]":
    """A process that compiles what is requested, without a GPU. It ends with the process that started it."""
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "0",
        "TRITON_STORE_BINARY_ONLY": "1",  # later starts read less
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "paceline.engine.start.compile_kernels", request.to_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )


def read_report(process: "subprocess.Popen[str]") -> CompileReport | None:
    """Wait for the end of `run_compiler`. None if it failed, which is logged."""
    with process:
        assert process.stdout is not None
        out = process.stdout.read()
        process.wait()  # before standard input is closed: the process ends with it
    if process.returncode:
        logger.warning("the kernels could not be compiled ahead: %s", out.strip()[-2000:])
        return None
    return CompileReport(**json.loads(out.splitlines()[-1]))


def _shapes(name: str) -> str:
    """A description of the model's shapes; its name if it cannot be opened as a whole model."""
    try:
        return repr(open_checkpoint(name).config)
    except PacelineError:
        return name

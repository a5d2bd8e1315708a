"""Makes a worker from its specification, and runs it as a process: `python -m paceline.runtime.deploy.worker SPEC`."""

import logging
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn, Protocol

import torch

from paceline.core.errors import PacelineError
from paceline.core.machine import freeze_loaded_objects, usable_cores
from paceline.kernels.cpu import native
from paceline.runtime.deploy.worker_build import build_draft_worker, build_target_worker
from paceline.runtime.deploy.worker_spec import WorkerSpec, write_error
from paceline.runtime.json_log import log_as
from paceline.runtime.target_worker.worker import WorkerHung
from paceline.runtime.transfer.channels.channel_pool import channels_for
from paceline.runtime.upstream.build import make_upstream_worker
from paceline.runtime.weights.manager import WeightManager
from paceline.runtime.wire.keys import KEY_ROLE_OF, KeyFolder
from paceline.runtime.wire.transport import require_keys

logger = logging.getLogger("paceline.runtime.deploy.worker")  # `__name__` is `__main__` here
SWITCH_SECONDS = 0.0005
"""Longest wait of a thread for the interpreter lock. With the default of 5 ms, the first token of a request would wait until
the engine's thread has prepared its drafts, and a finished pass until a batch of requests is received."""


class Worker(Protocol):
    """A target or draft worker. The constructor binds its address; `run` serves until `stop`, which is thread-safe."""

    @property
    def address(self) -> str: ...

    @property
    def weight_address(self) -> str:
        """Address of its weight server. Empty without a weight server."""
        ...

    @property
    def is_loading(self) -> bool:
        """Whether it loads or warms up."""
        ...

    def run(self) -> None: ...

    def stop(self) -> None: ...

    def drain(self, seconds: float) -> None:
        """Take no new work; `run` returns when the rest is done, at most `seconds` from now. Thread-safe."""
        ...


def make_worker(spec: WorkerSpec) -> Worker:
    """Load the model and listen. The later layers of a target may still be loading; its heartbeat reports that."""
    if spec.upstream is not None:
        return make_upstream_worker(spec)
    torch.set_num_threads(spec.threads or min(torch.get_num_threads(), usable_cores()))
    if spec.threads is not None:
        native.set_num_threads(spec.threads)
    keys = None if spec.keys is None else KeyFolder(Path(spec.keys))
    security = None if keys is None else keys.server_security(KEY_ROLE_OF[spec.role])
    require_keys(spec.address, security)  # before the model is loaded
    channels = channels_for(spec.transfer)
    weights = WeightManager(
        spec.weights, None if keys is None else keys.peer_security(KEY_ROLE_OF[spec.role]), channels
    )
    try:
        if spec.role == "draft":
            return build_draft_worker(spec, security, weights)
        return build_target_worker(spec, security, weights, channels)
    except BaseException:
        weights.close()
        raise


class Process:
    """This process, as signals and its parent control it. SIGTERM and SIGINT drain the worker within `drain_seconds`, and a
    second signal stops it at once. The parent's lines on standard input are `drain SECONDS`; the end of the input stops it."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._worker: Worker | None = None
        self._is_draining = False

    @property
    def worker(self) -> Worker | None:
        """The worker. None until it listens."""
        return self._worker

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def serve(self) -> None:
        """Load the model and run the worker until it has stopped or drained."""
        logger.info("loading %s", self._spec.engine.model)
        self._worker = make_worker(self._spec)
        logger.info("listening on %s", self._worker.address)
        freeze_loaded_objects()
        sys.setswitchinterval(SWITCH_SECONDS)
        self._worker.run()

    def stop(self) -> None:
        if self._worker is None or self._worker.is_loading:
            _kill_group()  # loading and compiling cannot be interrupted, and hold nothing
        self._worker.stop()

    def drain(self, seconds: float) -> None:
        if self._worker is None or self._worker.is_loading or self._is_draining:
            self.stop()
        else:
            self._is_draining = True
            self._worker.drain(seconds)

    def handle_signal(self, *_: object) -> None:
        self.drain(self._spec.drain_seconds)

    def follow_parent(self) -> None:
        """Read the parent's commands until it is gone, then stop. Its private folder is removed."""
        text = b""
        while data := os.read(0, 4096):  # not sys.stdin: its lock would block the exit
            *lines, text = (text + data).split(b"\n")
            for line in lines:
                self.drain(float(line.removeprefix(b"drain ")))
        if self._spec.error_file is not None:
            shutil.rmtree(Path(self._spec.error_file).parent, ignore_errors=True)
        self.stop()


def main(text: str) -> int:
    spec = WorkerSpec.from_json(text)
    log_as(spec.name, spec.log_level)
    process = Process(spec)
    signal.signal(signal.SIGTERM, process.handle_signal)
    signal.signal(signal.SIGINT, process.handle_signal)
    threading.Thread(target=process.follow_parent, daemon=True).start()
    try:
        process.serve()
    except Exception as error:
        if isinstance(error, WorkerHung):
            logger.critical("%s", error)
        if spec.error_file is not None:
            write_error(Path(spec.error_file), error)
        if isinstance(error, WorkerHung):  # the engine's thread would keep the process
            _kill_group()
        elif isinstance(error, PacelineError) and spec.error_file is None:  # otherwise the parent reports it
            logger.error("%s", error)
        if not isinstance(error, PacelineError):
            raise
        return 1
    logger.info("stopped")
    return 0


def _kill_group() -> NoReturn:
    """End this process at once, with the processes that it started if it leads their group."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

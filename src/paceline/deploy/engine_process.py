"""The engine of `paceline serve`: one target worker in a process of its own, over a local socket."""

import logging
import math
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from paceline.core.cluster_config import ClusterConfig, HealthConfig
from paceline.core.config import EngineConfig
from paceline.core.pool_config import PoolConfig
from paceline.deploy.deployment import free_address
from paceline.deploy.processes import Supervisor
from paceline.targets import TargetClient
from paceline.wire.worker_spec import Member, WorkerSpec, read_error

logger = logging.getLogger(__name__)

POOL = "engine"
POLL = 0.1
MAX_SOCKET_PATH = 100
"""Bytes of the path of a local socket; the system allows 108."""
GRACE = 60.0
"""Seconds that the engine has to save its cache to disk at the end."""
HEALTH = HealthConfig(heartbeat=0.25, misses=10**9, stall=1e9, canary=0.0)
"""Health of a single engine: only a broken connection counts. A silent engine compiles or computes a long pass, and no second
engine could continue its streams."""


SILENT_SECONDS = 30.0
"""Time without a heartbeat after which the engine process is ended and restarted: it is suspended, or holds its own lock."""
FAILED_STARTS = 3
"""Starts in a row that failed, after which the server is unhealthy."""


class EngineProcess:
    """A target worker that this process has started. `connect` returns its client and supervises the worker from then on."""

    def __init__(self, spec: WorkerSpec, supervisor: Supervisor) -> None:
        self._spec, self._supervisor = spec, supervisor
        self._stop = threading.Event()
        self._client: TargetClient | None = None
        self._thread = threading.Thread(target=self._supervise, name="paceline-supervisor")

    @property
    def pid(self) -> int | None:
        """Process id. None while it is not running."""
        return self._supervisor.pids.get(self._spec.name)

    @property
    def address(self) -> str:
        return self._spec.address

    def connect(self, price: float | None = None) -> TargetClient:
        """Blocks until the engine is ready. Raises the engine's error if it exits before. `price` is in dollars per hour."""
        pool = PoolConfig(self._spec.pool, "target", self._spec.engine.model, price=price)
        config = ClusterConfig((pool,), name="serve", health=HEALTH)
        client = TargetClient(
            config,
            self,
            engine=self._spec.engine,
            start_seconds=math.inf,
            check_workers=self._check,
            failure=self._failure,
        )
        self._client = client
        self._thread.start()
        return client

    def members(self) -> Sequence[Member]:
        """Implements `Directory`."""
        life = self._supervisor.lives[self._spec.name]
        return (replace(self._spec.member(self._spec.address), life=life),)

    def close(self) -> None:
        """Stop the worker."""
        if self._thread.is_alive():
            self._stop.set()
            self._thread.join()
        else:
            self._supervisor.stop()

    def _supervise(self) -> None:
        """Restart the engine when it exits, and end it when it is silent for too long."""
        assert self._client is not None
        name = self._spec.name
        try:
            while not self._stop.wait(POLL):
                if self._client.pool.silent_seconds(name) > SILENT_SECONDS:
                    logger.error("the engine does not answer for %.0f s and is restarted", SILENT_SECONDS)
                    self._supervisor.kill(name)
                self._supervisor.poll()
        finally:
            self._supervisor.stop()

    def _failure(self) -> str | None:
        """The reason why the engine will not be ready soon. None if it is ready or may become ready."""
        count = self._supervisor.num_failures(self._spec.name)
        return f"the engine failed to start {count} times in a row: see the log" if count >= FAILED_STARTS else None

    def _check(self) -> None:
        for code in self._supervisor.exit_texts.values():
            assert self._spec.error_file is not None
            raise read_error(Path(self._spec.error_file), f"the engine exited with {code}: see the log above")


@contextmanager
def _output_to(receive: Callable[[str], None] | None) -> Iterator[int | None]:
    """The file descriptor to which the engine writes; `receive` gets its lines, on a thread. None without `receive`: the engine
    writes to standard error."""
    if receive is None:
        yield None
        return
    reading, writing = os.pipe()

    def read() -> None:
        with open(reading, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                receive(line.rstrip("\n"))

    thread = threading.Thread(target=read, name="paceline-engine-output", daemon=True)
    thread.start()
    try:
        yield writing
    finally:
        os.close(writing)  # the engine has ended: the thread reads to the end
        thread.join(1.0)


@contextmanager
def running_engine(
    config: EngineConfig,
    trace_endpoint: str | None = None,
    log_level: str = "info",
    reports_phases: bool = False,
    receive: Callable[[str], None] | None = None,
) -> Iterator[EngineProcess]:
    """An engine process for the duration of the block. It loads its model while the caller continues. `receive` gets what it
    writes, line by line; without it the lines go to standard error."""
    with (
        _output_to(receive) as output,
        tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True) as folder,
    ):
        name = f"{POOL}-0"
        socket = Path(folder) / name
        spec = WorkerSpec(
            name=name,
            pool=POOL,
            role="target",
            address=f"ipc://{socket}" if len(bytes(socket)) <= MAX_SOCKET_PATH else free_address(),
            engine=config,
            trace_endpoint=trace_endpoint,
            error_file=str(Path(folder) / "error.json"),
            log_level=log_level,
            reports_phases=reports_phases,
        )
        supervisor = Supervisor([spec], grace=GRACE, output=output)
        process = EngineProcess(spec, supervisor)
        supervisor.start()
        try:
            yield process
        finally:
            process.close()

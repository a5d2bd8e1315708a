"""Target workers on threads of the test process, with real sockets and tiny engines that can be stopped at a step."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from paceline.core.clock import Clock
from paceline.core.cluster_config import ClusterConfig, HealthConfig
from paceline.core.errors import PacelineError
from paceline.core.output import StepOutput
from paceline.core.pool_config import PoolConfig
from paceline.core.request import Request, ValidatedRequest
from paceline.engine.engine import Engine
from paceline.engine.loop import EngineLoop
from paceline.model_files.fingerprint import SystemFingerprint
from paceline.policy.health import LivenessRules
from paceline.targets.pool import TargetPool
from paceline.telemetry.tracing import Tracing
from paceline.wire.gateway_messages import TO_TARGET_WORKER, FromGateway, Submit
from paceline.wire.transport import Listener, Received
from paceline.wire.worker_spec import Member
from paceline.worker.server.engine_backend import EngineBackend
from paceline.worker.server.server import WorkerServer
from tests.engine.harness import engine_of

LENIENT = HealthConfig(heartbeat=0.05, misses=400, stall=30.0, canary=0.0)
STRICT = HealthConfig(heartbeat=0.05, misses=10, stall=30.0, canary=0.0)
"""Half a second without a heartbeat is too long: on a busy machine a healthy worker is suspected, see `disappear`."""
WAIT = 60.0


def fingerprint(weights: str = "1", device: str = "NVIDIA H200", ranks: int = 1) -> SystemFingerprint:
    return SystemFingerprint(weights, "t", "bfloat16", "none", "int8", "auto", device, ranks)


class Gate:
    """Blocks an engine after a number of steps, until it is opened."""

    def __init__(self, engine: Engine, steps: int) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()
        self._left = steps
        self._advance = engine.advance
        engine.advance = self._gated  # type: ignore[method-assign]

    def open(self) -> None:
        self._open.set()

    def _gated(self) -> list[StepOutput]:
        if self._left == 0 and not self._open.is_set():
            self.reached.set()
            self._open.wait(WAIT)
        self._left -= 1
        return self._advance()


def engine_server(
    name: str, loop: EngineLoop, listener: Listener[FromGateway], clock: Clock | None = None, **parts: Any
) -> WorkerServer:
    """The server of an engine. `parts` are those of `EngineBackend`."""
    return WorkerServer(name, listener, EngineBackend(name, loop, **parts), clock)


class LossyListener(Listener[FromGateway]):
    """A listener that can drop all or some messages, like a lost machine."""

    is_cut = False
    lose: Callable[[Any], bool] = staticmethod(lambda message: False)
    num_submitted = 0
    """Requests received. Some of them may be finished."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.commands: deque[Callable[[], None]] = deque()
        """Calls that the owner makes before it receives the next message."""

    def receive(self, seconds: float = 0.0) -> Received[FromGateway] | None:
        while self.commands:
            self.commands.popleft()()
        received = super().receive(seconds)
        self.num_submitted += received is not None and isinstance(received.message, Submit)
        return received

    def send(self, peer: bytes, message: Any) -> bool:
        return True if self.is_cut or self.lose(message) else super().send(peer, message)


class WorkerThread:
    """A target worker on a thread."""

    def __init__(
        self,
        name: str,
        engine: Engine | None = None,
        port: int = 0,
        steps: int | None = None,
        tracing: Tracing | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.engine = engine or engine_of(tokenizer=True)
        self.gate = None if steps is None else Gate(self.engine, steps)
        self.listener = LossyListener(f"tcp://127.0.0.1:{port}", TO_TARGET_WORKER)
        self.worker = engine_server(name, EngineLoop(self.engine, tracing), self.listener, clock, tracing=tracing)
        self._start()

    def _start(self) -> None:
        self.thread = threading.Thread(target=self.worker.run, name=self.worker.name)
        self.thread.start()

    @property
    def backend(self) -> EngineBackend:
        assert isinstance(self.worker.backend, EngineBackend)
        return self.worker.backend

    @property
    def member(self) -> Member:
        return Member(self.worker.name, "target", "target", self.worker.address)

    @property
    def port(self) -> int:
        return int(self.worker.address.rpartition(":")[2])

    def run(self, command: Callable[[], None]) -> None:
        """Run the command on the worker's thread, after the messages that were received so far."""
        done = threading.Event()

        def execute() -> None:
            command()
            done.set()

        self.listener.commands.append(execute)
        self.listener.wake()
        assert done.wait(WAIT)

    def stop(self) -> None:
        if self.gate is not None:
            self.gate.open()
        self.worker.stop()
        self.thread.join(WAIT)
        assert not self.thread.is_alive()


class Members:
    """A directory that a test can change."""

    def __init__(self, *workers: WorkerThread) -> None:
        self.known = [worker.member for worker in workers]

    def members(self) -> Sequence[Member]:
        return list(self.known)


def cluster(**options: Any) -> ClusterConfig:
    options = {"health": LENIENT, "router": "round_robin", **options}
    return ClusterConfig((PoolConfig("target", "target", "tiny"),), **options)


@contextmanager
def pool_of(*workers: WorkerThread, wait: bool = True, **options: Any) -> Iterator[TargetPool]:
    pool = TargetPool(cluster(**options), Members(*workers))
    try:
        if wait:
            until(lambda: sum(target.is_usable for target in pool.targets().values()) == len(workers))
        yield pool
    finally:
        pool.close()
        for worker in workers:
            worker.stop()


def disappear(worker: WorkerThread, pool: TargetPool) -> None:
    """The worker's messages are lost from now on. The pool soon suspects it, and no other worker, however slow."""
    worker.listener.is_cut = True
    pool.targets()[worker.worker.name].health.liveness._rules = LivenessRules(STRICT.heartbeat * STRICT.misses)


class StreamReader:
    """Submits requests and reads their outputs."""

    def __init__(self, pool: TargetPool, *requests: Request) -> None:
        self.outputs: list[StepOutput] = []
        self._pool = pool
        self._events: SimpleQueue[StepOutput | PacelineError] = SimpleQueue()
        self._unfinished = 0
        self.submit(*requests)

    def submit(self, *requests: Request) -> None:
        self._unfinished += sum(request.sampling.n for request in requests)
        for request in requests:
            self._pool.submit(ValidatedRequest.of(request), self._events.put)

    def read(self) -> None:
        """Wait for one output."""
        event = self._events.get(timeout=WAIT)
        if isinstance(event, PacelineError):
            raise event
        self._unfinished -= event.finish_reason is not None
        self.outputs.append(event)

    def read_all(self) -> list[StepOutput]:
        while self._unfinished:
            self.read()
        assert self._events.empty()
        return self.outputs


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds; fails after `WAIT` seconds."""
    pause = threading.Event()
    for _ in range(int(WAIT / 0.005)):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("the condition did not become true in time")

"""A worker as a Ray actor: what it was created with, what it reports, and the class of the actors."""

import logging
import os
import signal
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.core.status.worker import WorkerLife
from paceline.runtime.deploy.on_ray.placement import ActorPlacement
from paceline.runtime.deploy.worker_spec import WorkerSpec
from paceline.runtime.json_log import log_as

if TYPE_CHECKING:
    from paceline.runtime.deploy.worker import Process

logger = logging.getLogger(__name__)

STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ActorOrder:
    """What an actor is created with. The actor returns it to a restarted `PoolsActor`."""

    spec: WorkerSpec
    """Its addresses are those to bind: port 0, and the host may be `auto`."""
    revision: int
    placement: ActorPlacement
    restarts: int = 0
    last_exit: str = ""


@dataclass(frozen=True, slots=True)
class ActorReport:
    pid: int
    node: str
    """Ray's id of the node."""
    life: WorkerLife
    address: str = ""
    """Address at which the worker listens. Empty while it loads."""
    weight_address: str = ""
    is_draining: bool = False
    exit: str = ""
    """The reason why the worker has ended. Empty while it runs. The process still waits for `ray.kill`."""


class WorkerActor:
    """The class of the actors. SIGTERM drains its worker, as in a process of its own."""

    def __init__(self, order: ActorOrder) -> None:
        """Returns at once: the model is loaded by a thread, so that the actor can report and be stopped meanwhile."""
        import ray

        own = order.spec
        log_as(own.name)
        self._order, self._exit = order, ""
        self._process: Process | None = None
        self._life = WorkerLife(order.restarts, time.time(), order.last_exit)
        self._node = ray.get_runtime_context().get_node_id()
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        own = replace(own, address=own.address.replace("auto", host))
        if own.weights is not None:
            own = replace(own, weights=replace(own.weights, address=own.weights.address.replace("auto", host)))
        signal.signal(signal.SIGTERM, lambda *_: self.drain(own.drain_seconds))
        self._thread = threading.Thread(target=self._run, args=(own,), name=own.name, daemon=True)
        self._thread.start()

    def order(self) -> ActorOrder:
        return self._order

    def report(self) -> ActorReport:
        worker = None if self._process is None else self._process.worker
        report = ActorReport(os.getpid(), self._node, self._life, exit=self._exit)
        if self._process is None or worker is None:
            return report
        return replace(
            report,
            address=worker.address,
            weight_address=worker.weight_address,
            is_draining=self._process.is_draining,
        )

    def drain(self, seconds: float) -> None:
        """Take no new work. The result of `report` shows when the remaining work is done, which takes at most `seconds`."""
        if self._process is None:  # nothing is loaded yet
            os._exit(1)
        self._process.drain(seconds)

    def stop(self) -> None:
        """Stop the worker, and return when it has stopped. The caller then kills the actor."""
        if self._process is None:
            os._exit(1)
        self._process.stop()
        self._thread.join(STOP_SECONDS)

    def _run(self, spec: WorkerSpec) -> None:
        try:
            from paceline.runtime.deploy.worker import Process  # needs torch; the actor of the pools does not

            self._process = Process(spec)
            self._process.serve()
        except Exception as error:
            logger.exception("%s failed", spec.name)
            self._exit = f"status 1 ({error})"
        else:
            self._exit = "status 0"

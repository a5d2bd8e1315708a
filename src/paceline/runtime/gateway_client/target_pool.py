"""The gateway's connections to all target workers: routes requests, watches workers, and continues streams of lost ones."""

import itertools
import logging
import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace

from paceline.cluster.health import WorkerState
from paceline.cluster.routing.kv_router import KvRouter
from paceline.cluster.routing.router import Router, make_router
from paceline.core.clock import Clock, WallClock
from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import EngineClosed, PacelineError
from paceline.core.output import OutputListener
from paceline.core.request import Request, ValidatedRequest
from paceline.core.speculation import SpeculationFlags
from paceline.core.worker_status import WorkerStatus
from paceline.runtime.deploy.directory import Directory, Member
from paceline.runtime.gateway_client.canaries import Canaries
from paceline.runtime.gateway_client.stream import RecallAnswers, Stream
from paceline.runtime.gateway_client.stream_table import StreamTable
from paceline.runtime.gateway_client.target_connection import TargetConnection
from paceline.runtime.gateway_client.worker_statuses import worker_statuses
from paceline.runtime.kv_events.tracker import CacheTracker
from paceline.runtime.wire.codec import MalformedMessage
from paceline.runtime.wire.gateway_messages import (
    FromTargetWorker,
    Heartbeat,
    Outputs,
    Recall,
    Recalled,
    RequestFailed,
    SetFlags,
    StatusReport,
    StatusRequest,
    SwapDraft,
    Welcome,
    WorkerAddress,
    WorkerList,
    check_size,
)
from paceline.runtime.wire.keys import KeyPair
from paceline.runtime.wire.messages import VERSION, Goodbye
from paceline.runtime.wire.wakeup import CommandQueue

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
"""Time between two polls from which the gateway itself was suspended."""
RECALL_SECONDS = 2.0
"""Time that workers have to answer a `Recall`."""
IN_USE = ("trial", "serving")
"""Phases of draft workers that targets use: drafts do not change the text, so a trial needs no comparison."""
DIRECTORY_SECONDS = 0.5
"""Interval of directory look-ups."""


class TargetPool:
    """Submits each request to the worker that the router chooses. Thread-safe; listeners are called on the pool's thread."""

    def __init__(
        self, config: ClusterConfig, directory: Directory, own: KeyPair | None = None, clock: Clock | None = None
    ) -> None:
        self._config = config
        self._directory = directory
        self._own = own
        self._clock = clock or WallClock()
        self._caches = CacheTracker(own, self._clock)
        self._kv_router = (
            KvRouter(self._caches.index, self._clock, config.shares_caches) if config.router == "kv_aware" else None
        )
        router: Router = self._kv_router or make_router(config.router)
        self._epoch = secrets.randbits(62)
        self._targets: dict[str, TargetConnection] = {}
        self._streams = StreamTable(self._targets, router, self._caches.index if config.shares_caches else None)
        self._canaries = Canaries(config.health.canary, self._targets, self._streams.submit)
        self._max_num_seqs = 1
        self._last_poll: float | None = None
        self._worker_lists: dict[str, WorkerList] = {}
        """By model."""
        self._flags: SpeculationFlags | None = None
        self._members: tuple[Member, ...] = ()
        self._commands = CommandQueue()
        self._numbers = itertools.count(1)
        self._recalls: dict[int, RecallAnswers] = {}
        self._lock = threading.Lock()  # guards `_is_closed`
        self._is_closed = False
        self._ready = threading.Event()
        self._stop = threading.Event()
        self._directory_thread = threading.Thread(target=self._watch_directory, name="paceline-members", daemon=True)
        self._thread = threading.Thread(target=self._run, name="paceline-pool", daemon=True)
        self._directory_thread.start()
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return not self._is_closed

    @property
    def num_continued(self) -> int:
        """Streams continued on another worker."""
        return self._streams.num_continued

    @property
    def max_num_seqs(self) -> int:
        """Sequences that all usable workers run at once. Without a usable worker, the last value."""
        welcomes = [target.welcome for target in list(self._targets.values()) if target.takes_streams]
        self._max_num_seqs = sum(one.max_num_seqs for one in welcomes if one is not None) or self._max_num_seqs
        return self._max_num_seqs

    def wait_ready(self, seconds: float) -> Welcome | None:
        """The `Welcome` of the first ready worker; None after `seconds`."""
        if not self._ready.wait(seconds):
            return None
        targets = [target for target in list(self._targets.values()) if target.member.role == "target"]
        return next((target.welcome for target in targets if target.welcome is not None), None)

    def silent_seconds(self, name: str) -> float:
        """Time since the worker's last heartbeat; 0 if it is not connected, or the gateway itself was suspended."""
        target = self._targets.get(name)
        return 0.0 if target is None else target.health.silent_seconds(self._last_poll or 0.0)

    def targets(self) -> Mapping[str, TargetConnection]:
        """The connections, for reading only."""
        return dict(self._targets)

    def workers(self) -> list[WorkerStatus]:
        """The status of every worker in the directory; of every configured one before the directory was read."""
        pools, members = self._config.pools, self._members
        if not members:
            members = tuple(Member(name, pool.name, pool.role, "") for pool in pools for name in pool.worker_names)
        prices = {pool.name: pool.price for pool in pools}
        return worker_statuses(members, list(self._targets.values()), self._kv_router, prices)

    def reports(self) -> list[StatusReport]:
        """The last report of each usable target."""
        targets = list(self._targets.values())
        return [target.report for target in targets if target.report is not None and target.takes_streams]

    def submit(self, request: Request, listener: OutputListener) -> None:
        """Start a validated request. Without a usable worker it waits for one."""
        request = ValidatedRequest.of(request)
        check_size(request)
        with self._lock:
            if self._is_closed:
                raise EngineClosed("the gateway was shut down")
            self._streams.reserve(request.id)
        stream = Stream(request, listener)
        self._commands.put(lambda: self._streams.add(stream))

    def submit_to(self, worker: str, request: Request, listener: OutputListener) -> None:
        """Start a validated request on this worker only, also on trial. The listener receives nothing if the worker is lost."""
        stream = Stream(ValidatedRequest.of(request), listener, pinned=worker)

        def submit() -> None:
            target = self._targets.get(worker)
            if target is not None and target.welcome is not None:
                self._streams.submit(stream)

        self._commands.put(submit)

    def recall(self, key: str) -> "Future[Recalled | None]":
        """The tokens of a resumable stream that any worker has kept; None if no worker knows its key. The stream ends there."""
        future: Future[Recalled | None] = Future()
        self._commands.put(lambda: self._start_recall(key, future))
        return future

    def cancel(self, request_id: str) -> None:
        """Stop a request; its listener receives nothing more. An unknown or finished request is not an error."""
        if self.is_running:
            self._commands.put(lambda: self._streams.cancel(request_id))

    def set_flags(self, flags: SpeculationFlags) -> None:
        """Send the flags to every worker, including workers that join later."""
        self._commands.put(lambda: self._send_flags(flags))

    def swap_draft(self, swap: SwapDraft) -> None:
        """Send the swap to every target that has a draft of its own, and ask for its status."""

        def send() -> None:
            for target in self._targets.values():
                if target.report is not None and target.report.status.draft is not None:
                    target.send(swap)
                    target.send(StatusRequest())

        self._commands.put(send)

    def close(self) -> None:
        """Fail running requests and disconnect. The workers keep running."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._stop.set()
        self._commands.put(lambda: None)
        for thread in (self._thread, self._directory_thread):
            if threading.current_thread() is not thread:
                thread.join()
        self._commands.close()

    def _watch_directory(self) -> None:
        """Read the directory at an interval: a worker may return at another address."""
        while not self._stop.is_set():
            try:
                members = tuple(self._directory.members())
            except Exception as error:  # the directory's own backend may be unavailable for a while
                logger.warning("the cluster's directory cannot be read: %s", error)
            else:
                self._commands.put(lambda members=members: self._set_members(members))  # type: ignore[misc]
            self._stop.wait(DIRECTORY_SECONDS)

    def _run(self) -> None:
        tick = min(0.05, self._config.health.heartbeat / 2)
        while not self._stop.is_set():
            self._commands.wait([target.socket for target in self._targets.values()], tick)
            self._commands.run_all()
            for target in list(self._targets.values()):
                while (message := target.receive()) is not None:
                    self._handle(target, message)
            self._caches.receive()
            self._poll()
            self._streams.assign()
        self._streams.fail_all(EngineClosed("the gateway was shut down while the request was running"))
        for recall in self._recalls.values():
            recall.finish()
        for target in self._targets.values():
            target.send(Goodbye("the gateway is stopping"))
            target.close()
        self._caches.close()

    def _set_members(self, members: tuple[Member, ...]) -> None:
        """Connect to workers that are new or moved, and disconnect from those that left."""
        self._members = members
        current = {m.name: m for m in members if m.role != "draft" and m.phase != "gone" and m.address}
        for name, target in list(self._targets.items()):
            member = current.get(name)
            if member is not None and replace(member, phase=target.member.phase) == target.member:
                target.member = member
                continue
            del self._targets[name]
            self._caches.remove(name)
            self._streams.release(target, "left the cluster")
            target.close()
        for name, member in current.items():
            if name not in self._targets:
                try:
                    connection = TargetConnection(member, self._config.health, self._own, self._epoch)
                except PacelineError as error:
                    logger.error("worker %s is ignored: %s", name, error)
                else:
                    self._targets[name] = connection
        self._send_worker_list()

    def _send_worker_list(self) -> None:
        """Send targets the addresses of draft workers, and of prefill workers and other targets of their model, without
        unhealthy or leaving ones. A draining target still sends its cached blocks to the others."""
        unhealthy = {target.name for target in self._targets.values() if target.state is WorkerState.UNHEALTHY}
        worker_lists = {}
        for model in {target.member.model for target in self._targets.values()}:
            drafts, prefills, targets = (
                [
                    WorkerAddress(member.name, member.address, member.key, member.phase == "trial")
                    for member in self._members
                    if member.role == role
                    and member.address
                    and member.name not in unhealthy
                    and member.phase in phases
                    if role == "draft" or member.model == model
                ]
                for role, phases in (("draft", IN_USE), ("prefill", ("serving",)), ("target", ("serving", "draining")))
            )
            worker_lists[model] = WorkerList(drafts, prefills, targets if self._config.shares_caches else [])
        if worker_lists != self._worker_lists or unhealthy:  # another gateway may have sent the unhealthy ones
            self._worker_lists = worker_lists
            for target in self._targets.values():
                target.send(worker_lists[target.member.model])

    def _handle(self, target: TargetConnection, message: FromTargetWorker | MalformedMessage) -> None:
        match message:
            case Outputs():
                for output in message.outputs:
                    self._streams.take_output(target, output)
                if not target.streams:  # the counts of a finished request are then current at once
                    target.send(StatusRequest())
            case Heartbeat():
                was_draining = target.is_draining
                has_restarted = target.take_heartbeat(message, self._clock.now())
                if target.is_draining and not was_draining:
                    logger.info("target worker %s is draining", target.name)
                if has_restarted:
                    self._canaries.forget(target.name)
                    self._streams.release(target, "restarted", has_died=True)
                else:
                    self._streams.take_heartbeat(target, message)
            case RequestFailed():
                self._streams.take_failure(target, message)
            case Welcome():
                self._handle_welcome(target, message)
            case StatusReport():
                target.report = message
            case Recalled():
                if message.number in self._recalls:
                    self._recalls[message.number].add(message)
            case Goodbye():
                if target.welcome is None:
                    logger.warning("%s: %s", target.name, message.reason)
                self._streams.release(target, "is stopping")
                target.welcome = None
            case MalformedMessage():
                logger.warning("%s sent a malformed message: %s", target.name, message)

    def _handle_welcome(self, target: TargetConnection, message: Welcome) -> None:
        if message.version != VERSION:
            text = "%s has protocol version %d, this gateway has %d: upgrade the older one"
            logger.error(text, target.name, message.version, VERSION)
            return
        refusal, target.refusal = target.refusal, self._refusal(target.member, message)
        if target.refusal:
            if target.refusal != refusal:
                logger.error("%s is refused: %s", target.name, target.refusal)
            return
        target.welcome = message
        if self._config.router == "kv_aware":
            self._caches.track(target.member, message)
        target.send(self._worker_lists.get(target.member.model, WorkerList([])))
        if self._flags is not None:
            target.send(SetFlags(self._flags))

    def _refusal(self, member: Member, welcome: Welcome) -> str:
        """Why the worker must not generate, if so: its pool has other weights at the same revision of the settings."""
        for other in self._targets.values():
            same = (other.member.pool, other.member.revision) == (member.pool, member.revision)
            if (
                same
                and other.welcome is not None
                and other.welcome.weights not in ("", welcome.weights)
                and welcome.weights
            ):
                return f"its weights are {welcome.weights}, those of {other.name} are {other.welcome.weights}"
        return ""

    def _start_recall(self, key: str, future: "Future[Recalled | None]") -> None:
        number = next(self._numbers)
        targets = [target for target in self._targets.values() if target.welcome is not None]
        asked = sum(target.send(Recall(number, key)) for target in targets)
        self._recalls[number] = RecallAnswers(asked, self._clock.now() + RECALL_SECONDS, future)

    def _send_flags(self, flags: SpeculationFlags) -> None:
        self._flags = flags
        for target in self._targets.values():
            target.send(SetFlags(flags))

    def _poll(self) -> None:
        now = self._clock.now()
        for number in [number for number, one in self._recalls.items() if one.is_complete(now)]:
            self._recalls.pop(number).finish()
        paused = now - (now if self._last_poll is None else self._last_poll)
        self._last_poll = now
        for target in self._targets.values():
            if paused > PAUSE_SECONDS:
                target.health.forgive(paused)
            before = target.state
            target.poll(now)
            if target.state is not before:
                logger.info("target worker %s %s", target.name, target.condition)
                if target.state in (WorkerState.SUSPECTED, WorkerState.UNHEALTHY):
                    has_died = target.health.is_disconnected
                    self._streams.release(target, target.condition, has_died)
                self._send_worker_list()
            if target.takes_streams and not target.is_loading and target.report is not None:
                self._ready.set()
            self._canaries.submit_if_due(target, now)

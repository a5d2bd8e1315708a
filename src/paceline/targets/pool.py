"""All target workers as one: routes requests to them, watches them, and continues the streams of lost ones.

`TokensRequests` asks all workers for the tokens of a stream that another gateway began. `DirectoryWatch` is a thread that reads
the cluster's directory at an interval: a worker may join, leave, or return at another address.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from paceline.core.clock import Clock, WallClock
from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import EngineClosed
from paceline.core.output import OutputListener
from paceline.core.request import SpeculationFlags, ValidatedRequest
from paceline.core.status import WorkerStatus
from paceline.policy.health import WorkerState
from paceline.policy.routing.kv_router import KvRouter
from paceline.policy.routing.router import Router, make_router
from paceline.targets.caches import CacheTracker
from paceline.targets.connection import TargetConnection
from paceline.targets.status import worker_statuses
from paceline.targets.stream import Stream
from paceline.targets.streams import StreamTable
from paceline.targets.targets import Canaries, Targets
from paceline.wire.codec import MalformedMessage
from paceline.wire.draft_messages import Goodbye
from paceline.wire.gateway_messages import (
    ChangeWeights,
    FromTargetWorker,
    Heartbeat,
    Outputs,
    RequestFailed,
    StatusReport,
    StatusRequest,
    SwapDraft,
    TokensReply,
    TokensRequest,
    Welcome,
    check_size,
)
from paceline.wire.keys import KeyPair
from paceline.wire.transport import CommandQueue
from paceline.wire.worker_spec import Directory, Member

logger = logging.getLogger(__name__)

REPLY_SECONDS = 2.0
"""Time that workers have to answer a `TokensRequest`."""


class TokensReplies:
    """Collects the answers and keeps the longest one: a worker that lost the stream earlier has fewer tokens."""

    def __init__(self, num_asked: int, deadline: float, future: "Future[TokensReply | None]") -> None:
        self._num_missing, self._deadline, self._future = num_asked, deadline, future
        self._best: TokensReply | None = None

    def add(self, answer: TokensReply) -> None:
        self._num_missing -= 1
        if answer.seed is not None and (self._best is None or _num_tokens(answer) > _num_tokens(self._best)):
            self._best = answer

    def is_complete(self, now: float) -> bool:
        return self._num_missing <= 0 or now >= self._deadline

    def finish(self) -> None:
        if self._future.set_running_or_notify_cancel():
            self._future.set_result(self._best)


class TokensRequests:
    """Used by one thread, the pool's. Times are seconds on its clock."""

    def __init__(self, targets: Mapping[str, TargetConnection]) -> None:
        """`targets` is a live view of the connections."""
        self._targets = targets
        self._numbers = itertools.count(1)
        self._open: dict[int, TokensReplies] = {}

    def start(self, key: str, future: "Future[TokensReply | None]", now: float) -> None:
        """Ask every worker. `future` receives the longest answer. It receives None if no worker knows the key."""
        number = next(self._numbers)
        targets = [target for target in self._targets.values() if target.welcome is not None]
        num_asked = sum(target.send(TokensRequest(number, key)) for target in targets)
        self._open[number] = TokensReplies(num_asked, now + REPLY_SECONDS, future)

    def add(self, answer: TokensReply) -> None:
        if answer.number in self._open:  # otherwise it is late
            self._open[answer.number].add(answer)

    def finish_complete(self, now: float) -> None:
        """Finish the requests that have all answers or no time left."""
        for number in [number for number, recall in self._open.items() if recall.is_complete(now)]:
            self._open.pop(number).finish()

    def finish_all(self) -> None:
        """Finish all requests with the answers so far."""
        while self._open:
            self._open.popitem()[1].finish()


def _num_tokens(answer: TokensReply) -> int:
    return sum(map(len, answer.choices))


DIRECTORY_SECONDS = 0.5
"""Interval of directory look-ups."""


class DirectoryWatch:
    """Passes the members to `listener` after each reading, on its own thread, until `close`."""

    def __init__(self, directory: Directory, listener: Callable[[tuple[Member, ...]], None]) -> None:
        self.directory = directory
        self._listener = listener
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-members", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Blocks until the current reading ends, unless the listener itself calls it."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                members = tuple(self.directory.members())
            except Exception as error:  # the directory's own backend may be unavailable for a while
                logger.warning("the cluster's directory cannot be read: %s", error)
            else:
                self._listener(members)
            self._stop.wait(DIRECTORY_SECONDS)


PAUSE_SECONDS = 1.0
"""Time between two polls from which the gateway itself was suspended."""


class TargetPool:
    """Submits each request to the worker that the router chooses. Thread-safe; listeners are called on the pool's thread."""

    def __init__(
        self, config: ClusterConfig, directory: Directory, own: KeyPair | None = None, clock: Clock | None = None
    ) -> None:
        self._config = config
        self._clock = clock or WallClock()
        self._caches = CacheTracker(own, self._clock)
        self._kv_router = (
            KvRouter(self._caches.index, self._clock, config.shares_caches) if config.router == "kv_aware" else None
        )
        router: Router = self._kv_router or make_router(config.router)
        self._targets = Targets(config, own)
        self._streams = StreamTable(self._targets, router, self._caches.index if config.shares_caches else None)
        self._canaries = Canaries(config.health.canary, self._targets, self._streams.submit)
        self._tokens_requests = TokensRequests(self._targets)
        self._last_poll: float | None = None
        self._commands = CommandQueue()
        self._lock = threading.Lock()  # guards `_is_closed`
        self._is_closed = False
        self._ready = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-pool", daemon=True)
        self._watch = DirectoryWatch(directory, lambda members: self._commands.put(lambda: self._set_members(members)))
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return not self._is_closed

    @property
    def num_continued(self) -> int:
        """Streams continued on another worker."""
        return self._streams.num_continued

    @property
    def fingerprint(self) -> str:
        """Digest of the fingerprint that all usable targets share. Empty if they differ, or if one is not known."""
        return self._targets.fingerprint

    @property
    def max_num_seqs(self) -> int:
        """Sequences that all usable workers run at once. It is the last value if no worker is usable."""
        return self._targets.max_num_seqs

    def wait_ready(self, seconds: float) -> Welcome | None:
        """The `Welcome` of the first ready worker. It is None after `seconds`."""
        return self._targets.first_welcome if self._ready.wait(seconds) else None

    def silent_seconds(self, name: str) -> float:
        """Time since the worker's last heartbeat. 0 if the worker is not connected, or if the gateway itself was suspended."""
        target = self._targets.get(name)
        return 0.0 if target is None else target.health.silent_seconds(self._last_poll or 0.0)

    def targets(self) -> Mapping[str, TargetConnection]:
        """The connections, for reading only."""
        return dict(self._targets)

    def workers(self) -> list[WorkerStatus]:
        """The status of every worker in the directory. Before the directory was read, these are the configured workers."""
        pools, members = self._config.pools, self._targets.members
        if not members:
            members = tuple(Member(name, pool.name, pool.role, "") for pool in pools for name in pool.worker_names)
        prices = {pool.name: pool.price for pool in pools}
        return worker_statuses(members, list(self._targets.values()), self._kv_router, prices)

    def reports(self) -> list[StatusReport]:
        """The last report of each usable target."""
        return self._targets.reports

    def submit(self, request: ValidatedRequest, listener: OutputListener) -> None:
        """Start a request. Without a usable worker it waits for one."""
        encoded = check_size(request)
        with self._lock:
            if self._is_closed:
                raise EngineClosed("the gateway was shut down")
            self._streams.reserve(request.id)
        stream = Stream(request, listener, encoded=encoded)
        self._commands.put(lambda: self._streams.add(stream))

    def submit_to(self, worker: str, request: ValidatedRequest, listener: OutputListener) -> None:
        """Start a request on this worker only, also on trial. The listener receives nothing if the worker is lost."""
        stream = Stream(request, listener, pinned=worker)

        def submit() -> None:
            target = self._targets.get(worker)
            if target is not None and target.welcome is not None:
                self._streams.submit(stream)

        self._commands.put(submit)

    def request_tokens(self, key: str) -> "Future[TokensReply | None]":
        """The tokens of a resumable stream that any worker has kept. None if no worker knows its key. The stream ends there."""
        future: Future[TokensReply | None] = Future()
        self._commands.put(lambda: self._tokens_requests.start(key, future, self._clock.now()))
        return future

    def cancel(self, request_id: str) -> None:
        """Stop a request; its listener receives nothing more. An unknown or finished request is not an error."""
        if self.is_running:
            self._commands.put(lambda: self._streams.cancel(request_id))

    def set_flags(self, flags: SpeculationFlags) -> None:
        """Send the flags to every worker, including workers that join later."""
        self._commands.put(lambda: self._targets.send_flags(flags))

    def swap_draft(self, swap: SwapDraft) -> None:
        """Send the swap to every target that has a draft of its own, and ask for its status."""
        self._commands.put(lambda: self._targets.send_swap(swap))

    def change_weights(self, change: ChangeWeights) -> None:
        """Send the change of weights to every target."""
        self._commands.put(lambda: self._targets.send_change(change))

    def settle_weights(self, is_kept: bool) -> None:
        """The change is over. If it is kept, targets that join later make it too."""
        self._commands.put(lambda: self._targets.settle_change(is_kept))

    def close(self) -> None:
        """Fail running requests and disconnect. The workers keep running."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._stop.set()
        self._commands.put(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._watch.close()
        self._commands.close()

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
        self._tokens_requests.finish_all()
        for target in self._targets.values():
            target.send(Goodbye("the gateway is stopping"))
            target.close()
        self._caches.close()

    def _set_members(self, members: tuple[Member, ...]) -> None:
        """Connect to workers that are new or moved, and disconnect from those that left."""
        for target in self._targets.disconnect(members):
            self._caches.remove(target.name)
            self._streams.release(target, "left the cluster")
            target.close()
        self._targets.connect(members)

    def _handle(self, target: TargetConnection, message: FromTargetWorker | MalformedMessage) -> None:
        match message:
            case Outputs():
                for output in message.outputs:
                    self._streams.handle_output(target, output)
                if not target.streams:  # the counts of a finished request are then current at once
                    target.send(StatusRequest())
            case Heartbeat():
                was_draining = target.is_draining
                has_restarted = target.handle_heartbeat(message, self._clock.now())
                if target.is_draining and not was_draining:
                    logger.info("target worker %s is draining", target.name)
                if has_restarted:
                    self._canaries.forget(target.name)
                    self._streams.release(target, "restarted", has_died=True)
                else:
                    self._streams.handle_heartbeat(target, message)
            case RequestFailed():
                self._streams.handle_failure(target, message)
            case Welcome():
                if self._targets.handle_welcome(target, message) and self._kv_router is not None:
                    self._caches.track(target.member, message)
            case StatusReport():
                target.report = message
            case TokensReply():
                self._tokens_requests.add(message)
            case Goodbye():
                if target.welcome is None:
                    logger.warning("%s: %s", target.name, message.reason)
                self._streams.release(target, "is stopping")
                target.welcome = None
            case MalformedMessage():
                logger.warning("%s sent a malformed message: %s", target.name, message)

    def _poll(self) -> None:
        now = self._clock.now()
        self._tokens_requests.finish_complete(now)
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
                self._targets.send_worker_lists()
            if target.takes_streams and not target.is_loading and target.report is not None:
                self._ready.set()
            self._canaries.submit_if_due(target, now)

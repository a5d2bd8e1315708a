"""The target workers of a cluster behind the interface of one engine: requests are routed, watched, and continued elsewhere
when their worker is lost."""

import logging
import secrets
import threading
from collections.abc import Mapping
from dataclasses import replace

from paceline.cluster.health.health import WorkerState
from paceline.cluster.routing.kv_router import KvRouter
from paceline.cluster.routing.router import Router, make_router
from paceline.core.clock import Clock, WallClock
from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import EngineClosed
from paceline.core.request import Request
from paceline.core.speculation import SpeculationFlags
from paceline.core.worker_status import WorkerStatus
from paceline.engine.validator import draw_seed
from paceline.runtime.deploy.directory import Directory, Member
from paceline.runtime.deploy.status import worker_statuses
from paceline.runtime.gateway_client.canaries import Canaries
from paceline.runtime.gateway_client.stream import Stream, StreamListener
from paceline.runtime.gateway_client.streams import Streams
from paceline.runtime.gateway_client.target_connection import TargetLine
from paceline.runtime.kv_events.follower import CacheFollower
from paceline.runtime.wire.codec import Malformed
from paceline.runtime.wire.keys import KeyPair
from paceline.runtime.wire.mailbox import Mailbox
from paceline.runtime.wire.messages import OLDEST, VERSION, Goodbye
from paceline.runtime.wire.report_messages import Report
from paceline.runtime.wire.request import check_fits
from paceline.runtime.wire.stream_messages import (
    Change,
    DrafterAddress,
    Drafters,
    FromTargetWorker,
    Outputs,
    Pulse,
    Refused,
    Welcome,
)

logger = logging.getLogger(__name__)

MEMBERS_SECONDS = 1.0


class TargetPool:
    """Submits to whichever worker the router chooses. Callers may be on any thread; listeners are called on the pool's."""

    def __init__(
        self, config: ClusterConfig, directory: Directory, own: KeyPair | None = None, clock: Clock | None = None
    ) -> None:
        self._config = config
        self._directory = directory
        self._own = own
        self._clock = clock or WallClock()
        self._caches = CacheFollower(own, self._clock)
        self._kv_router = (
            KvRouter(self._caches.index, self._clock, config.shares_caches) if config.router == "kv_aware" else None
        )
        router: Router = self._kv_router or make_router(config.router)
        self._epoch = secrets.randbits(62)
        self._lines: dict[str, TargetLine] = {}
        self._streams = Streams(self._lines, router, self._caches.index if config.shares_caches else None)
        self._canaries = Canaries(config.health.canary, self._lines, self._streams.send)
        self._seats = 1
        self._drafters = Drafters([])
        self._flags: SpeculationFlags | None = None
        self._members: tuple[Member, ...] = ()
        self._mailbox = Mailbox()
        self._lock = threading.Lock()  # guards `_closed`
        self._closed = False
        self._ready = threading.Event()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="paceline-members", daemon=True)
        self._thread = threading.Thread(target=self._run, name="paceline-pool", daemon=True)
        self._watcher.start()
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return not self._closed

    @property
    def continued(self) -> int:
        """Streams that went on elsewhere."""
        return self._streams.continued

    @property
    def seats(self) -> int:
        """Sequences that all usable workers run at once; with none in sight, as many as there last were."""
        self._seats = sum(line.load.seats for line in list(self._lines.values()) if line.takes_streams) or self._seats
        return self._seats

    def wait_ready(self, seconds: float) -> Welcome | None:
        """What a usable worker offers, as soon as there is one; None when the time is up."""
        if not self._ready.wait(seconds):
            return None
        targets = [line for line in list(self._lines.values()) if line.member.role == "target"]
        return next((line.welcome for line in targets if line.welcome is not None), None)

    def lines(self) -> Mapping[str, TargetLine]:
        """For whoever reports on them: look, and change nothing."""
        return dict(self._lines)

    def workers(self) -> list[WorkerStatus]:
        """Everybody who belongs to the cluster, those included that nobody has found yet, and how they are."""
        pools = self._config.pools
        named = [Member(name, pool.name, pool.role, "") for pool in pools for name in pool.worker_names]
        members = {member.name: member for member in (*named, *self._members)}
        return worker_statuses(members.values(), list(self._lines.values()), self._kv_router)

    def reports(self) -> list[Report]:
        """What the workers last said about themselves."""
        return [line.report for line in list(self._lines.values()) if line.report is not None and line.takes_streams]

    def submit(self, request: Request, listener: StreamListener) -> None:
        """Start a request that was validated. With no worker in sight it waits for one."""
        if request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=draw_seed()))
        check_fits(request)
        with self._lock:
            self._check_open()
            self._streams.reserve(request.id)
        stream = Stream(request, listener)
        self._mailbox.put(lambda: self._streams.begin(stream))

    def cancel(self, request_id: str) -> None:
        """Stop a request; its listener hears nothing more. What is finished or unknown is no error."""
        if self.is_running:
            self._mailbox.put(lambda: self._streams.end(request_id))

    def set_flags(self, flags: SpeculationFlags) -> None:
        """Tell every worker, those that join later included."""
        self._mailbox.put(lambda: self._change(flags))

    def close(self) -> None:
        """Give up what is running and hang up. The workers stay."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._over.set()
        self._mailbox.put(lambda: None)
        for thread in (self._thread, self._watcher):
            if threading.current_thread() is not thread:
                thread.join()
        self._mailbox.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the gateway was shut down")

    def _watch(self) -> None:
        """Ask who belongs to the cluster, now and then: workers that return may do so at another address."""
        while not self._over.is_set():
            try:
                members = tuple(self._directory.members())
            except Exception as error:  # whatever a directory asks may be away for a while
                logger.warning("the members of the cluster cannot be read: %s", error)
            else:
                self._mailbox.put(lambda members=members: self._meet(members))  # type: ignore[misc]
            self._over.wait(MEMBERS_SECONDS)

    def _run(self) -> None:
        tick = min(0.05, self._config.health.heartbeat / 2)
        while not self._over.is_set():
            self._mailbox.wait(
                [s for line in self._lines.values() for s in (line.connection.socket, line.monitor)], tick
            )
            self._mailbox.run_all()
            for line in list(self._lines.values()):
                while (message := line.connection.receive()) is not None:
                    self._hear(line, message)
            self._caches.receive()
            self._beat()
            self._streams.place()
        self._streams.fail_all(EngineClosed("the gateway was shut down while the request was running"))
        for line in self._lines.values():
            line.connection.send(Goodbye("the gateway is stopping"))
            line.close()
        self._caches.close()

    def _meet(self, members: tuple[Member, ...]) -> None:
        """Connect to who is new, or moved; let go of who left."""
        self._members = members
        targets = {member.name: member for member in members if member.role != "draft"}
        for name, line in list(self._lines.items()):
            if targets.get(name) != line.member:
                del self._lines[name]
                self._caches.forget(name)
                self._streams.lose(line, "left the cluster")
                line.close()
        for name, member in targets.items():
            if name not in self._lines:
                self._lines[name] = TargetLine(member, self._config.health, self._own, self._epoch)
        self._introduce()

    def _introduce(self) -> None:
        """Tell the targets of draft and prefill workers and of each other, but for those that say something else than their
        pool."""
        ill = {line.name for line in self._lines.values() if line.state is WorkerState.UNHEALTHY}
        drafts, prefills, targets = (
            [DrafterAddress(m.name, m.address, m.key) for m in self._members if m.role == role and m.name not in ill]
            for role in ("draft", "prefill", "target")
        )
        drafters = Drafters(drafts, prefills, targets if self._config.shares_caches else [])
        if drafters != self._drafters or ill:  # a gateway that does not know better may have said otherwise
            self._drafters = drafters
            for line in self._lines.values():
                line.connection.send(drafters)

    def _hear(self, line: TargetLine, message: FromTargetWorker | Malformed) -> None:
        now = self._clock.now()
        match message:
            case Outputs():
                for output in message.outputs:
                    self._streams.take(line, output)
            case Pulse():
                if line.heard(message, now):
                    self._canaries.forget(line.name)
                    self._streams.lose(line, "started anew")
            case Refused():
                self._streams.refused(line, message)
            case Welcome():
                self._welcome(line, message)
            case Report():
                line.report = message
            case Goodbye():
                self._streams.lose(line, "is stopping")
                line.welcome = None
            case Malformed():
                logger.warning("%s said something that is no message: %s", line.name, message)

    def _welcome(self, line: TargetLine, message: Welcome) -> None:
        if min(VERSION, message.version) < max(OLDEST, message.oldest):
            logger.error(
                "%s speaks versions %d to %d, we %d to %d", line.name, message.oldest, message.version, OLDEST, VERSION
            )
            return
        line.welcome = message
        if self._config.router == "kv_aware":
            self._caches.follow(line.member, message)
        line.connection.send(self._drafters)
        if self._flags is not None:
            line.connection.send(Change(self._flags.enabled, self._flags.method, self._flags.max_depth))

    def _change(self, flags: SpeculationFlags) -> None:
        self._flags = flags
        for line in self._lines.values():
            line.connection.send(Change(flags.enabled, flags.method, flags.max_depth))

    def _beat(self) -> None:
        now = self._clock.now()
        for line in self._lines.values():
            before = line.state
            line.beat(now)
            if line.state is not before:
                logger.info("target worker %s is %s", line.name, line.state.value)
                if line.state in (WorkerState.SUSPECTED, WorkerState.UNHEALTHY):
                    self._streams.lose(line, f"is {line.state.value}")
                self._introduce()
            if line.takes_streams and not line.is_loading:
                self._ready.set()
            self._canaries.ask(line, now)

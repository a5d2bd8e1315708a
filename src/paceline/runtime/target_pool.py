"""The target workers of a cluster behind the interface of one engine: requests are routed, watched, and continued elsewhere
when their worker is lost."""

import itertools
import logging
import secrets
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from paceline.cluster.health import WorkerState
from paceline.cluster.router import Router, make_router
from paceline.core.clock import Clock, WallClock
from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import EngineClosed, InvalidRequest
from paceline.core.flags import SpeculationFlags
from paceline.core.request import Request
from paceline.core.worker_status import WorkerStatus
from paceline.engine.intake import draw_seed
from paceline.runtime.canaries import Canaries
from paceline.runtime.codec import Malformed
from paceline.runtime.directory import Directory, Member
from paceline.runtime.keys import KeyPair
from paceline.runtime.mailbox import Mailbox
from paceline.runtime.messages import OLDEST, VERSION, Goodbye
from paceline.runtime.status import worker_statuses
from paceline.runtime.stream import Event, Gap, Stream, StreamListener
from paceline.runtime.stream_messages import (
    Change,
    DrafterAddress,
    Drafters,
    FromTargetWorker,
    Output,
    Outputs,
    Pulse,
    Refused,
    Report,
    Welcome,
    Withdraw,
)
from paceline.runtime.target_line import TargetLine
from paceline.runtime.wire_request import check_fits, to_submit

logger = logging.getLogger(__name__)

MAX_MOVES = 8
"""Workers a stream may lose without getting any further: one that kills whoever takes it must end."""
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
        self._router: Router = make_router(config.router)
        self._epoch = secrets.randbits(62)
        self._attempts = itertools.count(1)
        self._lines: dict[str, TargetLine] = {}
        self._canaries = Canaries(config.health.canary, self._lines, self._send)
        self._seats = 1
        self._drafters: tuple[DrafterAddress, ...] = ()
        self._flags: SpeculationFlags | None = None
        self._members: tuple[Member, ...] = ()
        self._streams: dict[str, Stream] = {}
        self._homeless: deque[Stream] = deque()
        self.continued = 0
        """Streams that went on elsewhere."""
        self._mailbox = Mailbox()
        self._lock = threading.Lock()  # guards `_closed` and `_ids`
        self._closed = False
        self._ids: set[str] = set()
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
    def seats(self) -> int:
        """Sequences that all usable workers run at once; with none in sight, as many as there last were."""
        self._seats = sum(line.load.seats for line in list(self._lines.values()) if line.is_usable) or self._seats
        return self._seats

    def wait_ready(self, seconds: float) -> Welcome | None:
        """What a usable worker offers, as soon as there is one; None when the time is up."""
        if not self._ready.wait(seconds):
            return None
        return next((line.welcome for line in list(self._lines.values()) if line.welcome is not None), None)

    def lines(self) -> Mapping[str, TargetLine]:
        """For whoever reports on them: look, and change nothing."""
        return dict(self._lines)

    def workers(self) -> list[WorkerStatus]:
        """Everybody who belongs to the cluster, and how they are."""
        return worker_statuses(self._members, list(self._lines.values()))

    def reports(self) -> list[Report]:
        """What the workers last said about themselves."""
        return [line.report for line in list(self._lines.values()) if line.report is not None and line.is_usable]

    def submit(self, request: Request, listener: StreamListener) -> None:
        """Start a request that was validated. With no worker in sight it waits for one."""
        if request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=draw_seed()))
        check_fits(request)
        with self._lock:
            self._check_open()
            if request.id in self._ids:
                raise InvalidRequest(f"a request with id {request.id!r} is already running", field="id")
            self._ids.add(request.id)
        stream = Stream(request, listener)
        self._mailbox.put(lambda: self._begin(stream))

    def cancel(self, request_id: str) -> None:
        """Stop a request; its listener hears nothing more. What is finished or unknown is no error."""
        if self.is_running:
            self._mailbox.put(lambda: self._end(request_id))

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
            self._beat()
            self._place()
        for stream in self._streams.values():
            self._tell(stream, EngineClosed("the gateway was shut down while the request was running"))
        for line in self._lines.values():
            line.connection.send(Goodbye("the gateway is stopping"))
            line.close()

    def _meet(self, members: tuple[Member, ...]) -> None:
        """Connect to who is new, or moved; let go of who left."""
        self._members = members
        targets = {member.name: member for member in members if member.role == "target"}
        for name, line in list(self._lines.items()):
            if targets.get(name) != line.member:
                del self._lines[name]
                self._lose(line, "left the cluster")
                line.close()
        for name, member in targets.items():
            if name not in self._lines:
                self._lines[name] = TargetLine(member, self._config.health, self._own, self._epoch)
        drafters = tuple(DrafterAddress(m.name, m.address, m.key) for m in members if m.role == "draft")
        if drafters != self._drafters:
            self._drafters = drafters
            for line in self._lines.values():
                line.connection.send(Drafters(list(drafters)))

    def _hear(self, line: TargetLine, message: FromTargetWorker | Malformed) -> None:
        now = self._clock.now()
        match message:
            case Outputs():
                for output in message.outputs:
                    stream = line.streams.get(output.attempt)
                    if stream is not None:
                        self._output(line, stream, output)
            case Pulse():
                if line.heard(message, now):
                    self._canaries.forget(line.name)
                    self._lose(line, "started anew")
            case Refused():
                self._refused(line, message)
            case Welcome():
                self._welcome(line, message)
            case Report():
                line.report = message
            case Goodbye():
                self._lose(line, "is stopping")
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
        line.connection.send(Drafters(list(self._drafters)))
        if self._flags is not None:
            line.connection.send(Change(self._flags.enabled, self._flags.method, self._flags.max_depth))

    def _output(self, line: TargetLine, stream: Stream, output: Output) -> None:
        try:
            step = stream.take(output)
        except Gap as gap:
            logger.warning("%s lost a part of a stream (%s); it is continued from what came", line.name, gap)
            line.connection.send(Withdraw([stream.attempt]))
            self._move(stream)
            return
        if stream.is_finished:
            self._forget(stream)
        self._tell(stream, step)

    def _refused(self, line: TargetLine, message: Refused) -> None:
        stream = line.streams.get(message.attempt)
        if stream is None:
            return
        if message.invalid:
            self._forget(stream)
            self._tell(stream, InvalidRequest(message.message, message.field))
        else:
            logger.warning("%s gave up a stream: %s", line.name, message.message)
            self._move(stream)

    def _begin(self, stream: Stream) -> None:
        self._streams[stream.request.id] = stream
        self._homeless.append(stream)

    def _end(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            line = self._lines.get(stream.worker or "")
            if line is not None:
                line.connection.send(Withdraw([stream.attempt]))
            self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        line = self._lines.get(stream.worker or "")
        if line is not None:
            line.streams.pop(stream.attempt, None)
        if stream in self._homeless:
            self._homeless.remove(stream)
        self._streams.pop(stream.request.id, None)
        with self._lock:
            self._ids.discard(stream.request.id)

    def _tell(self, stream: Stream, event: Event) -> None:
        try:
            stream.listener(event)
        except Exception:
            logger.exception("a listener failed; its request is cancelled")
            self._end(stream.request.id)

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
                    self._lose(line, f"is {line.state.value}")
            if line.is_usable:
                self._ready.set()
            self._canaries.ask(line, now)

    def _lose(self, line: TargetLine, why: str) -> None:
        """Continue all that the worker had. Should it still be there, it is told to stop; what it says is not heard."""
        streams = line.take_streams()
        if streams:
            logger.warning("target worker %s %s; %d streams are continued elsewhere", line.name, why, len(streams))
            line.connection.send(Withdraw([stream.attempt for stream in streams]))
        for stream in streams:
            self._move(stream)

    def _move(self, stream: Stream) -> None:
        line = self._lines.get(stream.worker or "")
        if line is not None:
            line.streams.pop(stream.attempt, None)
        stream.worker = None
        stream.moves += 1
        if stream.pinned is not None:
            self._forget(stream)
        elif stream.moves > MAX_MOVES:
            self._forget(stream)
            self._tell(
                stream,
                EngineClosed(f"the request lost {stream.moves} workers in a row without a token, and was given up"),
            )
        else:
            self.continued += 1
            self._homeless.append(stream)

    def _place(self) -> None:
        """Send every stream without a worker to one, if there is any."""
        if not self._homeless:
            return
        loads = {line.name: line.load for line in self._lines.values() if line.is_usable}
        for _ in range(len(self._homeless) if loads else 0):
            stream = self._homeless.popleft()
            name = stream.worker = self._router.choose(stream.request.prompt_ids, list(loads.values()))
            loads[name] = replace(loads[name], assigned=loads[name].assigned + stream.num_unfinished)
            self._send(stream)

    def _send(self, stream: Stream) -> None:
        """To the worker it was routed or is pinned to."""
        line = self._lines[stream.pinned or stream.worker or ""]
        assert line.welcome is not None
        stream.attempt, stream.worker = next(self._attempts), line.name
        line.streams[stream.attempt] = stream
        if not line.connection.send(to_submit(stream.rest(), stream.attempt, line.welcome.epoch)):
            self._move(stream)

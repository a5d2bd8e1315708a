"""A target worker's lines to the prefill workers: who is there, what was asked of whom, and how it ended."""

import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from paceline.cluster.health.health import WorkerState
from paceline.cluster.routing.handoff import PrefillLoad
from paceline.core.clock import Clock
from paceline.core.cluster_config import HealthConfig
from paceline.runtime.deploy.directory import Member
from paceline.runtime.gateway_client.target_connection import TargetConnection
from paceline.runtime.handoff.peer_book import PeerBook
from paceline.runtime.handoff.pending_prompt import PendingPrompt
from paceline.runtime.transfer.client import TransferClient
from paceline.runtime.transfer.messages import TransferHandle
from paceline.runtime.wire.codec import MalformedMessage
from paceline.runtime.wire.keys import KeyPair, Security
from paceline.runtime.wire.messages import Goodbye
from paceline.runtime.wire.stream_messages import (
    Cancel,
    FromTargetWorker,
    Heartbeat,
    Prefill,
    PrefillStarted,
    RequestFailed,
    Welcome,
    WorkerAddress,
)
from paceline.runtime.wire.wakeup import CommandQueue

logger = logging.getLogger(__name__)

MAX_PROMPTS = 8
"""Fetched at once."""
TICK = 0.05

Over = Callable[[PendingPrompt, int], None]


class PrefillLines:
    """`ask` may be called from any thread. Each prompt asked for ends in one call of `over`, on a thread of this object, with
    the number of its first blocks that are complete; by then nobody writes to its arrival."""

    def __init__(
        self, over: Over, own: KeyPair | None, kinds: Sequence[str] | None, health: HealthConfig, clock: Clock
    ) -> None:
        self.loads: tuple[PrefillLoad, ...] = ()
        """Those that may be asked."""
        self._over = over
        self._own = own
        self._health = health
        self._clock = clock
        self._client = TransferClient(None if own is None else Security(own), kinds)
        self._epoch = secrets.randbits(62)
        self._prefills: dict[str, Member] = {}
        self._peers = PeerBook()
        self._able_peers: dict[str, PrefillLoad] = {}
        self._attempts = itertools.count(1)
        self._lines: dict[str, TargetConnection] = {}
        self._asked: dict[int, PendingPrompt] = {}
        self._commands = CommandQueue()
        self._fetchers = ThreadPoolExecutor(MAX_PROMPTS, "paceline-fetch")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-prefill-lines", daemon=True)
        self._thread.start()

    def set_workers(self, workers: Sequence[WorkerAddress], peers: Sequence[WorkerAddress] = ()) -> None:
        """Use these and no others. `peers`: targets that may be asked for what they have cached."""
        members = {w.name: Member(w.name, "prefill", "prefill", w.address, w.key) for w in workers}
        others = {w.name: Member(w.name, "target", "target", w.address, w.key) for w in peers}
        self._commands.put(lambda: self._meet(members, others))

    def peer(self, name: str) -> PrefillLoad | None:
        """If it may be asked. From any thread; if there is no line to it yet, there soon will be."""
        self._commands.put(lambda: self._peers.need(name, self._clock.now()))
        return self._able_peers.get(name)

    def ask(self, pending: PendingPrompt) -> None:
        self._commands.put(lambda: self._ask(pending))

    def wake(self) -> None:
        """Some prompt was stopped."""
        self._commands.put(lambda: None)

    def close(self) -> None:
        """What was asked for must have been stopped; of what is still under way nothing more is heard."""
        self._ended.set()
        self._commands.put(lambda: None)
        self._thread.join()
        self._fetchers.shutdown()
        self._client.close()
        self._commands.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._turn()
            except Exception:  # prompts wait for this thread: it goes on
                logger.exception("something went wrong with the prefill workers")
                self._ended.wait(TICK)
        for line in self._lines.values():
            line.send(Goodbye("this worker is stopping"))
            line.close()

    def _turn(self) -> None:
        lines = self._lines.values()
        self._commands.wait([line.socket for line in lines], TICK)
        self._commands.run_all()
        for line in list(self._lines.values()):
            while (message := line.receive()) is not None:
                self._hear(line, message)
        self._tend(self._clock.now())

    def _meet(self, prefills: dict[str, Member], peers: dict[str, Member]) -> None:
        self._prefills = prefills
        self._peers.meet(peers)

    def _connect(self, members: Mapping[str, Member]) -> None:
        for name, line in list(self._lines.items()):
            if members.get(name) != line.member:
                del self._lines[name]
                self._lose(line, "left the cluster")
                line.close()
        for name, member in members.items():
            if name not in self._lines:
                self._lines[name] = TargetConnection(member, self._health, self._own, self._epoch)

    def _tend(self, now: float) -> None:
        self._connect(self._prefills | self._peers.lines(now))
        for line in self._lines.values():
            before = line.state
            line.poll(now)
            if line.state is not before:
                logger.info("%s worker %s is %s", line.member.role, line.name, line.state.value)
                if line.state is WorkerState.SUSPECTED:
                    self._lose(line, "does not answer")
        able = [one for one in self._lines.values() if one.is_usable and not one.is_loading]
        self.loads = tuple(
            PrefillLoad(line.name, line.heartbeat.prompt_tokens, line.round_trip or 0.0, line.welcome.max_model_len)
            for line in able
            if line.member.role == "prefill" and line.heartbeat is not None and line.welcome is not None
        )
        # What a peer has it gives at once, whatever else it has to compute
        self._able_peers = {
            line.name: PrefillLoad(line.name, 0, line.round_trip or 0.0)
            for line in able
            if line.member.role == "target"
        }
        for pending in list(self._asked.values()):
            if now >= pending.deadline:
                pending.fail(f"it took longer than {pending.deadline - pending.asked:.1f} s")
            self._end_if_stopped(pending)

    def _hear(self, line: TargetConnection, message: FromTargetWorker | MalformedMessage) -> None:
        match message:
            case Heartbeat():
                if line.take_heartbeat(message, self._clock.now()):
                    self._lose(line, "started anew")
            case Welcome():
                line.welcome = message
            case PrefillStarted():
                pending = self._waiting(message.attempt)
                if pending is not None:
                    pending.is_granted = True
                    self._fetchers.submit(self._fetch, pending, message.handle)
            case RequestFailed():
                pending = self._waiting(message.attempt)
                if pending is not None:
                    pending.fail(message.message)
                    self._end_if_stopped(pending)
            case Goodbye():
                self._lose(line, "is stopping")
                line.welcome = None
            case MalformedMessage():
                logger.warning("%s said something that is no message: %s", line.name, message)

    def _ask(self, pending: PendingPrompt) -> None:
        line, arrival = self._lines.get(pending.worker), pending.arrival
        assert arrival is not None
        plan = arrival.plan
        pending.attempt = next(self._attempts)
        self._asked[pending.attempt] = pending
        is_sent = (
            line is not None
            and line.welcome is not None
            and line.send(
                Prefill(
                    epoch=line.welcome.epoch,
                    attempt=pending.attempt,
                    ids=list(pending.ids[: plan.num_tokens]),
                    salt=pending.request.cache_salt,
                    first=plan.first,
                    layout=plan.layout.name,
                    state_layers=list(plan.state_layers),
                    state_rows=plan.state_rows,
                )
            )
        )
        if not is_sent:
            pending.fail("it cannot be reached")
        self._end_if_stopped(pending)

    def _waiting(self, attempt: int) -> PendingPrompt | None:
        """Asked for and not yet answered."""
        pending = self._asked.get(attempt)
        return None if pending is None or pending.is_granted else pending

    def _lose(self, line: TargetConnection, why: str) -> None:
        for pending in list(self._asked.values()):
            if pending.worker == line.name:
                pending.fail(f"it {why}")
                self._end_if_stopped(pending)

    def _end_if_stopped(self, pending: PendingPrompt) -> None:
        """One that is being fetched ends with its fetch."""
        if pending.stop.is_set() and not pending.is_granted:
            assert pending.arrival is not None
            self._end(pending, pending.arrival.plan.first)

    def _fetch(self, pending: PendingPrompt, handle: TransferHandle) -> None:  # on a thread of its own
        num_blocks = pending.fetch(self._client, handle, max(0.0, pending.deadline - self._clock.now()))
        self._commands.put(lambda: self._end(pending, num_blocks))

    def _end(self, pending: PendingPrompt, num_blocks: int) -> None:
        del self._asked[pending.attempt]
        line = self._lines.get(pending.worker)
        if line is not None:
            line.send(Cancel([pending.attempt]))
        self._over(pending, num_blocks)

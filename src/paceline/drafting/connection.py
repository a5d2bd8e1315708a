"""The connections of a target to the draft workers of its pool: handshake, health, round-trip time and load."""

import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from paceline.core.errors import PacelineError
from paceline.core.status import DrafterStatus, GoodputSums
from paceline.model_files.tokenizer import Fingerprint, describe_mismatch
from paceline.policy.health import Liveness, LivenessRules, PeerState
from paceline.policy.pairing.pairing import DraftView, RoundTrip
from paceline.wire.codec import MalformedMessage
from paceline.wire.draft_messages import (
    TO_TARGET,
    VERSION,
    Busy,
    Drafts,
    FromDraft,
    Goodbye,
    Hello,
    Load,
    Message,
    Ping,
    Pong,
)
from paceline.wire.keys import Security
from paceline.wire.link import LinkRules, PeerLink
from paceline.wire.transport import Connection

logger = logging.getLogger(__name__)

PROCESS_EPOCH = secrets.randbits(48)
HELLO_SECONDS = 1.0
"""Time between two attempts of the handshake."""
PING_SECONDS = 0.5
AWAITED_PING_SECONDS = 2.0
"""Time after which a pong is waited for, so that its round trip is exact."""
SILENT_SECONDS = 0.1
"""Time without an answer to a ping after which no draft is waited for."""
HUNG_SECONDS = 1.0
"""Time without an answer to a ping after which the worker counts as lost."""
MAX_FAULTS = 3
"""Wrong answers after which a worker is not used for a while. A hundred right answers cancel a wrong answer."""
RETRY_SECONDS, MAX_RETRY_SECONDS = 5.0, 60.0


LINK = LinkRules(HELLO_SECONDS, PING_SECONDS)
LIVENESS = LivenessRules(HUNG_SECONDS, counts_from_ping=True)


@dataclass(frozen=True, slots=True)
class DraftAddress:
    """Address of a draft worker, and the key that it must prove to own."""

    name: str
    address: str
    security: Security | None = None
    is_on_trial: bool = False
    """Whether it gets a share of the sequences only, see `policy/pairing/draft_trial.py`."""


@dataclass(slots=True)
class DraftCounters:
    """Counts of one connection since its start."""

    rounds: int = 0
    ready: int = 0
    """Rounds drafted before they were requested, or whose draft was sent ahead."""
    late: int = 0
    """Drafts received after their round was over."""
    faults: int = 0
    losses: int = 0
    busy: int = 0


class DraftConnection:
    """Connection to one draft worker. No method blocks. `on_lost` is called when its sequences are no longer open there."""

    def __init__(
        self, where: DraftAddress, tokenizer: Fingerprint, name: str, on_lost: Callable[["DraftConnection"], None]
    ) -> None:
        self.where = where
        self.refusal = ""
        """The reason why the draft does not fit the target. Empty if it fits, or if the handshake is not complete."""
        self.counters = DraftCounters()
        self.goodput = GoodputSums()
        self.load = Load()
        self.round_trip = RoundTrip()
        self._tokenizer, self._on_lost = tokenizer, on_lost
        self._warning: str | None = None
        """What differs between target and draft without making drafts wrong, as the log has it."""
        self._liveness = Liveness(LIVENESS)
        hello = Hello(VERSION, PROCESS_EPOCH, tokenizer, name)
        self._link: PeerLink[FromDraft] = PeerLink(
            where.address, TO_TARGET, where.security, hello, Ping, LINK, self._liveness
        )
        self._busy_until = 0.0
        self._awaited_at = 0.0
        """Time of the last answer that was waited for."""
        self._fault_score, self._last_fault = 0.0, ""
        self._retry_seconds = RETRY_SECONDS

    @property
    def state(self) -> PeerState:
        return self._liveness.standing

    @property
    def is_ready(self) -> bool:
        return self.state is PeerState.READY

    @property
    def epoch(self) -> int:
        """Epoch of the worker's process. 0 before the handshake."""
        return self._liveness.epoch or 0

    @property
    def transport(self) -> Connection[FromDraft]:
        return self._link.connection

    @property
    def trip_seconds(self) -> float:
        """Round-trip time. 0 if it is not known."""
        return self.round_trip.seconds or 0.0

    @property
    def pass_seconds(self) -> float:
        """Recent time of one pass over the worker's model. 0 if it is not known."""
        return self.load.pass_us * 1e-6

    def view(self, now: float) -> DraftView:
        is_usable = self.is_ready and now >= self._busy_until
        return DraftView(self.where.name, self.round_trip.seconds, self._queue_seconds, is_usable)

    def status(self, sequences: int) -> DrafterStatus:
        """`sequences` is the number of this target's sequences that are open at the worker."""
        percent = self.load.paused_hit_percent
        return DrafterStatus(
            name=self.where.name,
            state=(PeerState.SUSPECTED if self.state is PeerState.LOST else self.state).value,
            sequences=sequences,
            queue_seconds=self._queue_seconds,
            round_trip=self.round_trip.measured or 0.0,
            answers=self.counters.rounds,
            hits=self.counters.ready,
            late=self.counters.late,
            pass_seconds=self.pass_seconds,
            paused_share=None if percent is None else percent / 100,
            refusal=self.refusal,
            goodput=self.goodput,
        )

    def send(self, message: Message, now: float) -> None:
        if not self._link.send(message):
            self.lose(now, "its queue is full")

    def receive(self, now: float, was_awaited: bool) -> FromDraft | None:
        """The next message for the proposer, if one has arrived. `was_awaited` says that the caller has waited for it."""
        while (message := self._link.receive()) is not None:
            self._liveness.observe_answer(None, now)
            if isinstance(message, MalformedMessage):
                self.record_fault(f"sent a malformed message ({message})")
            elif isinstance(message, Hello):
                self._handle_hello(message, now)
            elif isinstance(message, Pong):
                self.load = message.load
                if (seconds := self._link.round_trip(message.nonce, now)) is not None:
                    self.observe_round_trip(seconds, now, was_awaited)
            elif isinstance(message, Drafts | Busy) and message.epoch != self.epoch:
                continue  # from an earlier process
            else:
                if isinstance(message, Drafts | Busy):
                    self.load = message.load
                return message
        return None

    def observe_round_trip(self, seconds: float, now: float, was_awaited: bool) -> None:
        """An answer that took the worker no time took `seconds`."""
        self.round_trip.observe(seconds, was_awaited)
        if was_awaited:
            self._awaited_at = now

    def check_alive(self, now: float) -> None:
        """Send the next ping now, because a draft did not arrive in time."""
        if self.is_ready:
            self._link.send_before(now)

    def is_silent(self, now: float) -> bool:
        """Whether a ping is unanswered for so long that no answer is expected soon."""
        return self._liveness.silent_seconds(now) > max(SILENT_SECONDS, 4.0 * self.trip_seconds)

    def needs_awaited_ping(self, now: float) -> bool:
        """Whether a ping is in flight and the last answer that was waited for is long ago."""
        return self.is_ready and self._liveness.is_awaited and now - self._awaited_at > AWAITED_PING_SECONDS

    def maintain(self, now: float) -> None:
        """Send a due `Hello` or `Ping`, and detect a loss. Call it after all messages were received."""
        self._link.poll()
        if self._liveness.is_disconnected:
            if self.is_ready:
                self.lose(now, "the connection broke")
            elif self.state is PeerState.REFUSED:  # the worker may return with another draft
                self._link.send_before(now + HELLO_SECONDS)
        if self._liveness.state(now) is PeerState.SUSPECTED:
            self.lose(now, f"no answer for {self._liveness.silent_seconds(now):.1f} s")
        if self._fault_score >= MAX_FAULTS:
            self._fault_score = 0.0
            self.lose(now, f"it {self._last_fault}", self._retry_seconds)
            self._retry_seconds = min(2.0 * self._retry_seconds, MAX_RETRY_SECONDS)
        # Only a ping is always answered: a sequence may be closed before its draft is complete
        if self._link.send_due(now, self.is_ready) is False and self.is_ready:
            self.lose(now, "its queue is full")

    def repeat_hello(self, now: float) -> None:
        """The worker does not know this target any more."""
        self._link.repeat_handshake(PeerState.JOINING, now)
        self._on_lost(self)

    def mark_busy(self, until: float) -> None:
        self.counters.busy += 1
        self._busy_until = until

    def record_success(self) -> None:
        """A valid answer arrived."""
        self._fault_score = max(0.0, self._fault_score - 0.01)
        self._retry_seconds = max(RETRY_SECONDS, self._retry_seconds * 0.99)

    def record_fault(self, what: str) -> None:
        """An invalid answer arrived. `maintain` stops using the worker after `MAX_FAULTS`."""
        self.counters.faults += 1
        self._fault_score += 1.0
        self._last_fault = what

    def refuse(self, now: float, reason: str) -> None:
        """Do not use the worker, because target and draft do not fit together. The handshake is repeated after a pause."""
        if reason != self.refusal:
            logger.warning(
                "draft worker %s (%s) is refused: %s; choose a draft with the target's tokenizer; "
                "`paceline doctor CLUSTER.yaml` shows the first difference",
                self.where.name,
                self.where.address,
                reason,
            )
        self.refusal = reason
        self._link.repeat_handshake(PeerState.REFUSED, now + MAX_RETRY_SECONDS)
        self._on_lost(self)

    def lose(self, now: float, reason: str, pause: float = HELLO_SECONDS) -> None:
        """Stop using the worker, and repeat the handshake after `pause` seconds."""
        if self.state is PeerState.LOST:
            return
        logger.warning(
            "draft worker %s (%s) is lost: %s; next attempt in %.0f s",
            self.where.name,
            self.where.address,
            reason,
            pause,
        )
        self.counters.losses += 1
        self._link.repeat_handshake(PeerState.LOST, now + pause)
        self._link.reconnect()  # the messages queued on the old socket are obsolete
        self._on_lost(self)

    def close(self) -> None:
        self._link.close()

    @property
    def _queue_seconds(self) -> float:
        return self.load.waiting * self.pass_seconds

    def _handle_hello(self, hello: Hello, now: float) -> None:
        if hello.version != VERSION:
            text = f"the worker has protocol version {hello.version}, this target {VERSION}: upgrade the older one"
            self.refuse(now, text)
        elif hello.tokenizer is None:
            self.refuse(now, "the worker sent no checksums of its tokenizer")
        elif (mismatch := describe_mismatch(self._tokenizer, hello.tokenizer)) is not None:
            self.refuse(now, mismatch)
        elif self.state is not PeerState.LOST:
            if self._liveness.observe_answer(hello.epoch, now):
                logger.info("draft worker %s has restarted", self.where.name)
            warning = self._tokenizer.difference(hello.tokenizer)
            if warning is not None and warning != self._warning:
                logger.warning("draft worker %s: %s", self.where.name, warning)
            self._warning = warning
            self.refusal = ""
            self._link.send_before(now)


class DraftConnections:
    """One connection per draft worker, by name. One thread writes; any thread may read `all`."""

    def __init__(self, tokenizer: Fingerprint, name: str, on_lost: Callable[[DraftConnection], None]) -> None:
        """`tokenizer` and `name` are those of the target. `on_lost` is called when no sequence is open at a worker any more."""
        self._tokenizer, self._name, self._on_lost = tokenizer, name, on_lost
        self._by_name: dict[str, DraftConnection] = {}

    @property
    def all(self) -> tuple[DraftConnection, ...]:
        return tuple(self._by_name.values())

    @property
    def has_ready(self) -> bool:
        """Whether a draft worker is connected."""
        return any(connection.is_ready for connection in self.all)

    def __getitem__(self, name: str) -> DraftConnection:
        return self._by_name[name]

    def are_to(self, workers: Iterable[DraftAddress]) -> bool:
        """Whether the connections are exactly those to `workers`, with the same workers on trial."""
        known = {name: connection.where for name, connection in self._by_name.items()}
        return {where.name: where for where in workers} == known

    def set_workers(self, workers: Iterable[DraftAddress]) -> None:
        """Connect to exactly these workers. Connections to workers that stay are kept."""
        wanted = {where.name: where for where in workers}
        kept = {
            name: connection
            for name, connection in self._by_name.items()
            if _is_same(wanted.get(name), connection.where)
        }
        for name, connection in kept.items():  # the end of a trial does not disconnect
            connection.where = wanted[name]
        for name, connection in self._by_name.items():
            if name not in kept:
                self._on_lost(connection)
                _disconnect(connection, "no longer in the cluster")
        for name, where in wanted.items():
            if name not in kept:
                try:
                    kept[name] = DraftConnection(where, self._tokenizer, self._name, self._on_lost)
                except PacelineError as error:
                    logger.error("draft worker %s is ignored: %s", name, error)
        self._by_name = kept

    def close(self) -> None:
        """Send `Goodbye` and close the connections."""
        for connection in self.all:
            _disconnect(connection, "target stops")


def _disconnect(connection: DraftConnection, reason: str) -> None:
    if connection.is_ready:
        connection.transport.send(Goodbye(reason))
    connection.close()


def _is_same(wanted: DraftAddress | None, known: DraftAddress) -> bool:
    return wanted is not None and replace(wanted, is_on_trial=known.is_on_trial) == known

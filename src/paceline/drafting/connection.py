"""A target's connection to one draft worker: handshake, health, round-trip time and load.

The connections of a target to all draft workers of its pool.
"""

import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum

from paceline.core.errors import PacelineError
from paceline.core.status import DrafterStatus, GoodputSums
from paceline.model_files.tokenizer import Fingerprint, describe_mismatch
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


class ConnectionState(Enum):
    JOINING = "joining"
    READY = "ready"
    LOST = "suspected"
    """Lost or faulty. The handshake is repeated after a pause."""
    REFUSED = "refused"
    """The draft does not fit the target. The handshake is repeated, because the worker may restart with another draft."""


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
        self.state = ConnectionState.JOINING
        self.refusal = ""
        """The reason why the draft does not fit the target. Empty if it fits, or if the handshake is not complete."""
        self.counters = DraftCounters()
        self.goodput = GoodputSums()
        self.load = Load()
        self.epoch = 0
        self.round_trip = RoundTrip()
        self._tokenizer, self._name, self._on_lost = tokenizer, name, on_lost
        self._transport: Connection[FromDraft] = self._connect()
        self._next_hello = self._next_ping = self._busy_until = 0.0
        self._unanswered_since: float | None = None
        """Time of the first ping without an answer."""
        self._awaited_at = 0.0
        """Time of the last answer that was waited for."""
        self._last_ping: tuple[int, float] = (0, 0.0)
        self._fault_score, self._last_fault = 0.0, ""
        self._retry_seconds = RETRY_SECONDS

    @property
    def is_ready(self) -> bool:
        return self.state is ConnectionState.READY

    @property
    def transport(self) -> Connection[FromDraft]:
        return self._transport

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
            state=self.state.value,
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
        if not self._transport.send(message):
            self.lose(now, "its queue is full")

    def receive(self, now: float, was_awaited: bool) -> FromDraft | None:
        """The next message for the proposer, if one has arrived. `was_awaited` says that the caller has waited for it."""
        while (message := self._transport.receive()) is not None:
            self._unanswered_since = None
            if isinstance(message, MalformedMessage):
                self.record_fault(f"sent a malformed message ({message})")
            elif isinstance(message, Hello):
                self._handle_hello(message, now)
            elif isinstance(message, Pong):
                self.load = message.load
                if message.nonce == self._last_ping[0]:
                    self.observe_round_trip(now - self._last_ping[1], now, was_awaited)
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
        self._next_ping = min(self._next_ping, now)

    def is_silent(self, now: float) -> bool:
        """Whether a ping is unanswered for so long that no answer is expected soon."""
        unanswered = self._unanswered_since
        return unanswered is not None and now - unanswered > max(SILENT_SECONDS, 4.0 * self.trip_seconds)

    def needs_awaited_ping(self, now: float) -> bool:
        """Whether a ping is in flight and the last answer that was waited for is long ago."""
        return self.is_ready and self._unanswered_since is not None and now - self._awaited_at > AWAITED_PING_SECONDS

    def maintain(self, now: float) -> None:
        """Send a due `Hello` or `Ping`, and detect a loss. Call it after all messages were received."""
        if self._transport.was_disconnected():
            if self.is_ready:
                self.lose(now, "the connection broke")
            elif self.state is ConnectionState.REFUSED:  # the worker may return with another draft
                self._next_hello = min(self._next_hello, now + HELLO_SECONDS)
        if self._unanswered_since is not None and now - self._unanswered_since > HUNG_SECONDS:
            self.lose(now, f"no answer for {now - self._unanswered_since:.1f} s")
        if self._fault_score >= MAX_FAULTS:
            self._fault_score = 0.0
            self.lose(now, f"it {self._last_fault}", self._retry_seconds)
            self._retry_seconds = min(2.0 * self._retry_seconds, MAX_RETRY_SECONDS)
        if not self.is_ready:
            if now >= self._next_hello:
                if self.state is ConnectionState.LOST:
                    self.state = ConnectionState.JOINING
                self._next_hello = now + HELLO_SECONDS
                self._transport.send(Hello(VERSION, PROCESS_EPOCH, self._tokenizer, self._name))
        elif now >= self._next_ping:
            self._next_ping = now + PING_SECONDS
            self._last_ping = (self._last_ping[0] + 1, now)
            # Only a ping is always answered: a sequence may be closed before its draft is complete
            self._unanswered_since = now if self._unanswered_since is None else self._unanswered_since
            self.send(Ping(self._last_ping[0]), now)

    def repeat_hello(self, now: float) -> None:
        """The worker does not know this target any more."""
        self.state, self._next_hello, self._unanswered_since = ConnectionState.JOINING, now, None
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
                "draft worker %s (%s) is refused: %s; choose a draft with the target's tokenizer and chat template; "
                "`paceline doctor CLUSTER.yaml` shows the first difference",
                self.where.name,
                self.where.address,
                reason,
            )
        self.refusal = reason
        self.state, self._next_hello, self._unanswered_since = ConnectionState.REFUSED, now + MAX_RETRY_SECONDS, None
        self._on_lost(self)

    def lose(self, now: float, reason: str, pause: float = HELLO_SECONDS) -> None:
        """Stop using the worker, and repeat the handshake after `pause` seconds."""
        if self.state is ConnectionState.LOST:
            return
        logger.warning(
            "draft worker %s (%s) is lost: %s; next attempt in %.0f s",
            self.where.name,
            self.where.address,
            reason,
            pause,
        )
        self.counters.losses += 1
        self.state, self._next_hello, self._unanswered_since = ConnectionState.LOST, now + pause, None
        # A new socket, because the messages queued on the old socket are obsolete
        self._transport.close()
        self._transport = self._connect()
        self._on_lost(self)

    def close(self) -> None:
        self._transport.close()

    @property
    def _queue_seconds(self) -> float:
        return self.load.waiting * self.pass_seconds

    def _connect(self) -> Connection[FromDraft]:
        return Connection(self.where.address, TO_TARGET, self.where.security)

    def _handle_hello(self, hello: Hello, now: float) -> None:
        if hello.version != VERSION:
            text = f"the worker has protocol version {hello.version}, this target {VERSION}: upgrade the older one"
            self.refuse(now, text)
        elif hello.tokenizer is None:
            self.refuse(now, "the worker sent no checksums of its tokenizer")
        elif (mismatch := describe_mismatch(self._tokenizer, hello.tokenizer)) is not None:
            self.refuse(now, mismatch)
        elif self.state is not ConnectionState.LOST:
            if self.epoch and hello.epoch != self.epoch:
                logger.info("draft worker %s has restarted", self.where.name)
            self.state, self.epoch, self.refusal = ConnectionState.READY, hello.epoch, ""
            self._next_ping = now


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

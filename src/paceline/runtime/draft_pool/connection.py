"""A target's line to one draft worker: greeting, health, and what is known of its speed."""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from paceline.cluster.pairing.pairing import DraftView, RoundTrip
from paceline.runtime.wire.codec import Malformed
from paceline.runtime.wire.keys import Security
from paceline.runtime.wire.messages import (
    OLDEST,
    TO_TARGET,
    VERSION,
    Busy,
    Drafts,
    Fault,
    FromDraft,
    Hello,
    Load,
    Message,
    Ping,
    Pong,
    common_version,
)
from paceline.runtime.wire.transport import Connection

logger = logging.getLogger(__name__)

PROCESS_EPOCH = secrets.randbits(48)
GREET_AGAIN = 1.0
PING_EVERY = 0.5
WATCH_EVERY = 2.0
"""Seconds after which a ping is waited for, so that its time can be believed."""
SILENT = 0.1
"""Seconds without a word after a ping: it is not waited for any longer."""
HUNG = 1.0
"""And after so many it is hung, or cut off."""
FAULTS = 3
"""Wrong answers, not made good by a hundred right ones each, after which a worker is left alone for a while."""
PENANCE, MAX_PENANCE = 5.0, 60.0


class State(Enum):
    GREETING = "greeting"
    UP = "up"
    AWAY = "away"
    """Lost, refused or not trusted: it is greeted again after a while."""


@dataclass(frozen=True, slots=True)
class DraftAddress:
    """Where a draft worker listens, and the key it must prove to own."""

    name: str
    address: str
    security: Security | None = None


@dataclass(slots=True)
class LinkCounts:
    rounds: int = 0
    ready: int = 0
    """Answered from what had been drafted ahead, or sent before it was asked for."""
    late: int = 0
    """Answers that came after their round was over."""
    faults: int = 0
    losses: int = 0
    busy: int = 0


class DraftLink:
    """All its methods return at once. `on_lost` hears when whatever was open there is open no more."""

    def __init__(self, where: DraftAddress, vocabulary: str, name: str, on_lost: Callable[["DraftLink"], None]) -> None:
        self.where = where
        self.state = State.GREETING
        self.counts = LinkCounts()
        self.load = Load()
        self.epoch = 0
        self.version = 0
        self.round_trip = RoundTrip()
        self._vocabulary, self._name, self._on_lost = vocabulary, name, on_lost
        self._line: Connection[FromDraft] = self._connect()
        self._greet_at = self._ping_at = self._busy_until = 0.0
        self._asked_at: float | None = None
        self._watched_at = 0.0
        self._pinged: tuple[int, float] = (0, 0.0)
        self._distrust, self._fault = 0.0, ""
        self._penance = PENANCE

    @property
    def is_up(self) -> bool:
        return self.state is State.UP

    @property
    def line(self) -> Connection[FromDraft]:
        return self._line

    @property
    def trip(self) -> float:
        """Seconds of a round trip, 0 while unknown."""
        return self.round_trip.seconds or 0.0

    def view(self, now: float) -> DraftView:
        queue = self.load.waiting * self.load.pass_us * 1e-6
        usable = self.is_up and now >= self._busy_until
        return DraftView(self.where.name, self.round_trip.seconds, queue, usable)

    def send(self, message: Message, now: float) -> None:
        if not self._line.send(message):
            self.lose(now, "it reads nothing that is sent")

    def receive(self, now: float, watched: bool) -> FromDraft | None:
        """The next message that is not the link's own business, if one has come. `watched`: somebody was waiting for it."""
        while (message := self._line.receive()) is not None:
            self._asked_at = None
            if isinstance(message, Malformed):
                self.fault(f"sent what is no message ({message})")
            elif isinstance(message, Hello):
                self._greeted(message, now)
            elif isinstance(message, Pong):
                self.load = message.load
                if message.nonce == self._pinged[0]:
                    self.timed(now - self._pinged[1], now, watched)
            elif isinstance(message, Drafts | Busy) and message.epoch != self.epoch:
                continue  # from before its last start
            else:
                if isinstance(message, Drafts | Busy):
                    self.load = message.load
                return message
        return None

    def timed(self, seconds: float, now: float, watched: bool) -> None:
        """An answer that took its sender no time took this long."""
        self.round_trip.observe(seconds, watched)
        if watched:
            self._watched_at = now

    def suspect(self, now: float) -> None:
        """A draft did not come in time: ask whether it is there at all."""
        self._ping_at = min(self._ping_at, now)

    def is_silent(self, now: float) -> bool:
        """A ping has gone unanswered for so long that nothing else will be answered soon."""
        return self._asked_at is not None and now - self._asked_at > max(SILENT, 4.0 * self.trip)

    def is_unwatched(self, now: float) -> bool:
        """A ping is under way, and it has been long since anybody saw an answer come in."""
        return self.is_up and self._asked_at is not None and now - self._watched_at > WATCH_EVERY

    def tend(self, now: float) -> None:
        """Whatever is due: a greeting, a ping, a verdict on its silence. Call it after all that came was received."""
        if self._line.was_cut() and self.is_up:
            self.lose(now, "the connection broke")
        if self._asked_at is not None and now - self._asked_at > HUNG:
            self.lose(now, f"it has said nothing for {now - self._asked_at:.1f} s")
        if self._distrust >= FAULTS:
            self._distrust = 0.0
            self.lose(now, f"it {self._fault}", self._penance)
            self._penance = min(2.0 * self._penance, MAX_PENANCE)
        if self.state is not State.UP:
            if now >= self._greet_at:
                self.state, self._greet_at = State.GREETING, now + GREET_AGAIN
                self._line.send(Hello(VERSION, OLDEST, PROCESS_EPOCH, self._vocabulary, self._name))
        elif now >= self._ping_at:
            self._ping_at = now + PING_EVERY
            self._pinged = (self._pinged[0] + 1, now)
            # Of all questions only this one is always answered: a sequence may be closed before its draft is made
            self._asked_at = now if self._asked_at is None else self._asked_at
            self.send(Ping(self._pinged[0]), now)

    def greet_again(self, now: float) -> None:
        """It does not know us any more."""
        self.state, self._greet_at, self._asked_at = State.GREETING, now, None
        self._on_lost(self)

    def busy(self, until: float) -> None:
        self.counts.busy += 1
        self._busy_until = until

    def good(self) -> None:
        """An answer that was as it should be."""
        self._distrust = max(0.0, self._distrust - 0.01)
        self._penance = max(PENANCE, self._penance * 0.99)

    def fault(self, what: str) -> None:
        """It answered wrongly. That costs a draft; done often, it costs the worker its place."""
        self.counts.faults += 1
        self._distrust += 1.0
        self._fault = what

    def refused(self, now: float, fault: Fault, text: str) -> None:
        self.lose(now, f"it refuses ({fault.name.lower()}): {text}", MAX_PENANCE)

    def lose(self, now: float, why: str, pause: float = GREET_AGAIN) -> None:
        if self.state is State.AWAY:
            return
        logger.warning(
            "draft worker %s (%s): %s; asking again in %.0f s", self.where.name, self.where.address, why, pause
        )
        self.counts.losses += 1
        self.state, self._greet_at, self._asked_at = State.AWAY, now + pause, None
        # A new line: what was queued on the old one is of no use to anybody
        self._line.close()
        self._line = self._connect()
        self._on_lost(self)

    def close(self) -> None:
        self._line.close()

    def _connect(self) -> Connection[FromDraft]:
        return Connection(self.where.address, TO_TARGET, self.where.security)

    def _greeted(self, hello: Hello, now: float) -> None:
        version = common_version(hello)
        if version is None:
            self.refused(now, Fault.VERSION, f"it speaks {hello.oldest} to {hello.version}, this is {VERSION}")
        elif hello.vocabulary != self._vocabulary:
            self.refused(now, Fault.VOCABULARY, f"its vocabulary is {hello.vocabulary[:16]}")
        elif self.state is not State.AWAY:
            if self.epoch and hello.epoch != self.epoch:
                logger.info("draft worker %s has restarted", self.where.name)
            self.state, self.epoch, self.version = State.UP, hello.epoch, version
            self._ping_at = now

"""A client's link to a peer that answers a handshake and then pings.

It sends a hello until the peer is joined, and pings from then on. The messages and the decisions are the caller's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from paceline.policy.health import Liveness, PeerState
from paceline.wire.codec import Codec, MalformedMessage
from paceline.wire.keys import Security
from paceline.wire.transport import Connection

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class LinkRules:
    hello_seconds: float
    """Time between two attempts of the handshake."""
    ping_seconds: float
    pings_with_hello: bool = False
    """Whether a ping follows each hello. Otherwise only joined peers get pings."""


class PeerLink(Generic[M]):
    """One thread makes all calls, and none of them blocks. Times are seconds on its clock."""

    def __init__(
        self,
        address: str,
        codec: Codec[M],
        security: Security | None,
        hello: Any,
        ping: Callable[[int], Any],
        rules: LinkRules,
        liveness: Liveness,
    ) -> None:
        """`ping` returns the ping with a nonce. The caller reports answers to `liveness`."""
        self._address, self._codec, self._security = address, codec, security
        self._hello, self._ping, self._rules = hello, ping, rules
        self.liveness = liveness
        self.connection = self._connect()
        self.nonce = 0
        """Nonce of the last ping."""
        self._next = 0.0
        """Time of the next hello or ping."""
        self._pinged: float | None = None
        """Time of the last ping. None if it went to a peer that had not joined: its answer takes longer than a round trip."""

    def send(self, message: Any) -> bool:
        """Returns False if the send queue is full."""
        return self.connection.send(message)

    def receive(self) -> M | MalformedMessage | None:
        """The next message, of any kind. None if none has arrived."""
        return self.connection.receive()

    def round_trip(self, nonce: int, now: float) -> float | None:
        """Seconds from the last ping to its answer, which has this nonce. None if the answer is to another ping."""
        return None if nonce != self.nonce or self._pinged is None else now - self._pinged

    def poll(self) -> None:
        """Notices a broken connection. Call it after all messages were received."""
        if self.connection.was_disconnected():
            self.liveness.disconnected()

    def send_due(self, now: float, is_joined: bool) -> bool | None:
        """Sends a hello or a ping if it is due. Returns whether there was room for it in the queue. None if nothing is due."""
        if now < self._next:
            return None
        self._next = now + (self._rules.ping_seconds if is_joined else self._rules.hello_seconds)
        is_sent = True
        if not is_joined:
            if self.liveness.standing is PeerState.LOST:
                self.liveness.decide(PeerState.JOINING)
            is_sent = self.send(self._hello)
        if is_joined or self._rules.pings_with_hello:
            self.nonce += 1
            self._pinged = now if is_joined else None
            self.liveness.observe_sent(now)
            is_sent = self.send(self._ping(self.nonce)) and is_sent
        return is_sent

    def send_before(self, when: float) -> None:
        """Sends the next hello or ping at `when`, unless it is due before."""
        self._next = min(self._next, when)

    def repeat_handshake(self, standing: PeerState, when: float) -> None:
        """The peer is lost, refused or joining until it answers a hello, which is sent at `when`."""
        self.liveness.decide(standing)
        self._next = when

    def reconnect(self) -> None:
        """Replaces the socket, with the messages queued on it."""
        self.connection.close()
        self.connection = self._connect()

    def close(self) -> None:
        self.connection.close()

    def _connect(self) -> Connection[M]:
        return Connection(self._address, self._codec, self._security)

"""The link to a peer: what it sends when, how it measures a round trip, and how it starts again."""

from typing import Any

import pytest

from paceline.policy.health import Liveness, LivenessRules, PeerState
from paceline.wire import link as link_module
from paceline.wire.draft_messages import TO_TARGET, FromDraft
from paceline.wire.link import LinkRules, PeerLink

HELLO = "hello"
DRAFTS, TARGETS = LinkRules(1.0, 0.5), LinkRules(0.5, 0.5, pings_with_hello=True)


class Socket:
    """The interface of `Connection` that a link uses."""

    def __init__(self, *_: Any) -> None:
        self.sent: list[Any] = []
        self.has_room, self.is_broken, self.is_closed = True, False, False

    def send(self, message: Any) -> bool:
        self.sent.append(message)
        return self.has_room

    def was_disconnected(self) -> bool:
        return self.is_broken

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def _no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "Connection", Socket)


def link_with(rules: LinkRules) -> PeerLink[FromDraft]:
    liveness = Liveness(LivenessRules(1.0, counts_from_ping=True))
    return PeerLink("tcp://127.0.0.1:1", TO_TARGET, None, HELLO, lambda nonce: nonce, rules, liveness)


def sent_by(link: PeerLink[FromDraft], now: float, is_joined: bool) -> list[Any]:
    """What the link sends at this time."""
    socket: Any = link.connection
    before = len(socket.sent)
    link.send_due(now, is_joined)
    sent: list[Any] = socket.sent[before:]
    return sent


def test_a_link_sends_hello_until_the_peer_has_joined_and_pings_from_then_on() -> None:
    link = link_with(DRAFTS)
    assert [sent_by(link, now, False) for now in (0.0, 0.9, 1.0)] == [[HELLO], [], [HELLO]]
    link.send_before(1.1)
    assert [sent_by(link, now, True) for now in (1.0, 1.1, 1.5, 1.6)] == [[], [1], [], [2]]


def test_a_ping_may_follow_each_hello() -> None:
    link = link_with(TARGETS)
    assert [sent_by(link, now, False) for now in (0.0, 0.4, 0.5)] == [[HELLO, 1], [], [HELLO, 2]]
    assert link.round_trip(2, 0.6) is None, "the handshake takes longer than a round trip"
    assert sent_by(link, 1.0, True) == [3]
    assert link.round_trip(3, 1.25) == 0.25
    assert link.round_trip(2, 1.25) is None


def test_a_full_queue_is_reported() -> None:
    link = link_with(DRAFTS)
    socket: Any = link.connection
    assert (link.send_due(0.0, True), link.send_due(0.1, True)) == (True, None)
    socket.has_room = False
    assert link.send_due(1.0, True) is False


def test_a_lost_peer_joins_again_after_a_pause_over_a_new_socket() -> None:
    link = link_with(DRAFTS)
    link.liveness.observe_answer(7, 0.0)
    old: Any = link.connection
    old.is_broken = True
    link.poll()
    assert link.liveness.state(0.0) is PeerState.SUSPECTED
    link.repeat_handshake(PeerState.LOST, 5.0)
    link.reconnect()
    assert old.is_closed
    assert link.connection is not old
    assert (sent_by(link, 4.9, False), link.liveness.standing) == ([], PeerState.LOST)
    assert (sent_by(link, 5.0, False), link.liveness.standing) == ([HELLO], PeerState.JOINING)


def test_a_refused_peer_gets_hello_and_stays_refused_until_it_answers() -> None:
    link = link_with(DRAFTS)
    link.repeat_handshake(PeerState.REFUSED, 60.0)
    link.send_before(1.0)
    assert (sent_by(link, 1.0, False), link.liveness.standing) == ([HELLO], PeerState.REFUSED)

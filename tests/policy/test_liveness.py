"""Whether a peer answers: silences counted from the last answer, and from the first ping without an answer."""

import pytest

from paceline.policy.health import Liveness, LivenessRules, PeerState

RULES = LivenessRules(silent_seconds=1.0)
PINGS = LivenessRules(silent_seconds=1.0, counts_from_ping=True)


def test_a_peer_is_joining_until_its_handshake() -> None:
    liveness = Liveness(PINGS)
    assert liveness.observe_answer(None, 0.0) is False
    assert (liveness.state(9.0), liveness.epoch) == (PeerState.JOINING, None)
    liveness.disconnected()
    assert liveness.state(9.0) is PeerState.JOINING
    assert liveness.observe_answer(7, 9.0) is False
    assert (liveness.state(9.0), liveness.epoch) == (PeerState.READY, 7)


def test_another_epoch_is_a_restart() -> None:
    liveness = Liveness(RULES)
    assert [liveness.observe_answer(epoch, 0.0) for epoch in (7, 7, 8, None, 8)] == [False, False, True, False, False]


def test_a_silence_begins_with_the_last_answer() -> None:
    liveness = Liveness(RULES)
    liveness.observe_answer(7, 0.0)
    liveness.observe_sent(0.9)
    assert (liveness.state(1.0), liveness.is_awaited) == (PeerState.READY, False)
    assert (liveness.state(1.1), liveness.silent_seconds(1.1)) == (PeerState.SUSPECTED, 1.1)
    liveness.observe_answer(7, 2.0)
    assert liveness.state(3.0) is PeerState.READY


def test_a_silence_begins_with_the_first_ping_without_an_answer() -> None:
    liveness = Liveness(PINGS)
    liveness.observe_answer(7, 0.0)
    assert (liveness.state(9.0), liveness.is_awaited) == (PeerState.READY, False)
    liveness.observe_sent(9.0)
    liveness.observe_sent(9.5)
    assert (liveness.state(10.0), liveness.is_awaited) == (PeerState.READY, True)
    assert liveness.state(10.1) is PeerState.SUSPECTED
    liveness.observe_answer(None, 10.2)
    assert (liveness.state(20.0), liveness.is_awaited) == (PeerState.READY, False)


@pytest.mark.parametrize("rules", [RULES, PINGS])
def test_a_broken_connection_is_no_silence(rules: LivenessRules) -> None:
    liveness = Liveness(rules)
    liveness.observe_answer(7, 0.0)
    liveness.observe_sent(0.0)
    liveness.disconnected()
    assert (liveness.state(0.5), liveness.silent_seconds(0.5)) == (PeerState.SUSPECTED, 0.0)
    liveness.observe_answer(7, 0.6)
    assert liveness.state(0.6) is PeerState.READY


@pytest.mark.parametrize("standing", [PeerState.JOINING, PeerState.LOST, PeerState.REFUSED])
def test_a_decision_holds_until_the_handshake(standing: PeerState) -> None:
    liveness = Liveness(PINGS)
    liveness.observe_answer(7, 0.0)
    liveness.observe_sent(0.0)
    liveness.disconnected()
    liveness.decide(standing)
    liveness.observe_answer(None, 1.0)
    assert (liveness.state(99.0), liveness.is_awaited) == (standing, False)
    assert liveness.observe_answer(8, 99.0) is True
    assert liveness.state(99.0) is PeerState.READY


def test_a_pause_of_the_observer_does_not_count() -> None:
    liveness = Liveness(RULES)
    liveness.forgive(5.0)
    liveness.observe_answer(7, 0.0)
    liveness.forgive(100.0)
    assert (liveness.state(101.0), liveness.silent_seconds(100.5)) == (PeerState.READY, 0.5)

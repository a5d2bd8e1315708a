"""Time by part of a step, counts of a traffic class, and the log of a change."""

import logging

import pytest

from paceline.core.status import BreakerState, TrafficStatus
from paceline.core.traffic import TrafficClass
from paceline.engine.traffic import (
    BREAKER,
    DECLINED,
    FALLBACKS,
    NO_DRAFT,
    NO_ROOM,
    ClassCounts,
    StepTotals,
    TrafficStatistics,
)
from paceline.policy.depth.breaker import Breaker, BreakerRule
from paceline.policy.depth.drift import AcceptanceChange
from paceline.policy.depth.observation import RoundObservation
from tests.traffic import traffic_class

# --- step totals


def test_seconds_are_added_to_their_part() -> None:
    totals = StepTotals()
    totals.add(0, True, draft=0.2, network=0.1, verify=1.0)
    totals.add(0, True, draft=0.2, network=0.0, verify=1.0)
    totals.add(0, False, draft=0.0, network=0.0, verify=0.5)
    totals.add(7, True, draft=1.0, network=2.0, verify=4.0)
    assert totals.seconds == {"draft": 0.4, "network": 0.1, "verify": 2.0, "plain": 0.5, "prompt": 7.0}


def test_seconds_are_a_copy() -> None:
    totals = StepTotals()
    before = totals.seconds
    totals.add(0, False, 0.0, 0.0, 1.0)
    assert before["plain"] == 0.0


# --- counts of one class


def test_an_empty_report() -> None:
    report = ClassCounts().report(TrafficClass("ngram", "chat"), BreakerState.CLOSED)
    assert (report.method, report.category, report.breaker) == ("ngram", "chat", BreakerState.CLOSED)
    assert (report.alphas, report.mean_depth, report.fallbacks) == ((), 0.0, dict.fromkeys(FALLBACKS, 0))


def test_alpha_counts_tested_positions() -> None:
    counts = ClassCounts()
    for _ in range(40):
        counts.add_round(drafted=3, accepted=1)  # position 1 accepted, 2 rejected, 3 not tested
        counts.add_round(drafted=3, accepted=3)
    alphas = counts.report(TrafficClass("", ""), BreakerState.CLOSED).alphas
    assert alphas == pytest.approx((1.0, 0.5, 1.0), abs=0.01)


def test_alpha_follows_the_traffic() -> None:
    counts = ClassCounts()
    for _ in range(1000):
        counts.add_round(1, 1)
    for _ in range(400):
        counts.add_round(1, 0)
    assert counts.report(TrafficClass("", ""), BreakerState.CLOSED).alphas[0] < 0.05


def test_a_position_no_longer_drafted_keeps_its_alpha() -> None:
    counts = ClassCounts()
    counts.add_round(2, 2)
    for _ in range(10):
        counts.add_round(1, 0)
    assert counts.report(TrafficClass("", ""), BreakerState.CLOSED).alphas == pytest.approx((0.083, 1.0), abs=0.01)


def test_many_decisions_at_once_equal_as_many_single_ones() -> None:
    both = one_by_one, at_once = ClassCounts(), ClassCounts()
    for counts in both:
        counts.add_depth(4)
    for _ in range(50):
        one_by_one.add_depth(0)
        one_by_one.add_fallback(DECLINED)
    at_once.add_depth(0, 50)
    at_once.add_fallback(DECLINED, 50)
    found = [counts.report(TrafficClass("", ""), BreakerState.CLOSED) for counts in both]
    assert found[0].mean_depth == pytest.approx(found[1].mean_depth)
    assert found[0].fallbacks == found[1].fallbacks


def test_mean_depth_and_fallbacks() -> None:
    counts = ClassCounts()
    for depth in (0, 4) * 50:
        counts.add_depth(depth)
    counts.add_fallback(BREAKER)
    counts.add_fallback(NO_DRAFT)
    counts.add_fallback(NO_DRAFT)
    report = counts.report(TrafficClass("", ""), BreakerState.OPEN)
    assert report.mean_depth == pytest.approx(2.0, abs=0.02)
    assert {reason: count for reason, count in report.fallbacks.items() if count} == {"breaker": 1, "no_draft": 2}


# --- traffic classes

A_CHAT = traffic_class("a/chat")


def classes(trips: int = 1000) -> TrafficStatistics:
    return TrafficStatistics(Breaker(BreakerRule(threshold=0.5, trips=trips, window=2)))


def observe(
    traffic: TrafficStatistics, name: str, drafted: int, accepted: int, sequence_id: int = 0
) -> list[AcceptanceChange]:
    return traffic.observe([RoundObservation(sequence_id, traffic_class(name), drafted, accepted)], 1.0, advantage=0.5)


def reports(traffic: TrafficStatistics) -> dict[str, TrafficStatus]:
    return {f"{report.method}/{report.category}": report for report in traffic.report()}


def test_rounds_are_counted_by_class() -> None:
    traffic = classes()
    observe(traffic, "a/chat", 3, 2)
    observe(traffic, "a/code", 3, 0)
    observe(traffic, "a/code", 0, 0)
    chat, code = reports(traffic)["a/chat"], reports(traffic)["a/code"]
    assert (chat.tested, chat.accepted, chat.fallbacks[NO_DRAFT]) == (3, 2, 0)
    assert (code.tested, code.accepted, code.fallbacks[NO_DRAFT]) == (1, 0, 1)


def test_the_breaker_ignores_rounds_without_drafts() -> None:
    traffic = classes(trips=4)
    for _ in range(8):
        observe(traffic, "a/chat", 0, 0)
    assert traffic.breaker.state(A_CHAT) is BreakerState.CLOSED
    for _ in range(8):
        observe(traffic, "a/chat", 3, 0)
    assert reports(traffic)["a/chat"].breaker is BreakerState.OPEN


def test_fallbacks_are_counted_by_reason() -> None:
    traffic = classes()
    traffic.count_decision(A_CHAT, 4, is_allowed=True)
    traffic.count_decision(A_CHAT, 0, is_allowed=True)
    traffic.count_decision(A_CHAT, 0, is_allowed=False)
    traffic.count_no_room(A_CHAT)
    (report,) = traffic.report()
    assert {name: count for name, count in report.fallbacks.items() if count} == {DECLINED: 1, BREAKER: 1, NO_ROOM: 1}
    assert report.mean_depth == pytest.approx(4 / 3, rel=0.02)


def test_a_change_is_returned_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    traffic, changes = classes(), []
    with caplog.at_level(logging.WARNING, logger="paceline"):
        for sequence_id in range(100):
            for _ in range(8):
                changes += observe(traffic, "a/chat", 2, 2 if sequence_id < 40 else 0, sequence_id)
            changes += traffic.close([sequence_id])
    (change,) = changes
    assert (change.traffic, change.before, change.after) == (A_CHAT, 1.0, 0.0)
    assert caplog.messages == [
        "acceptance of a drafts for 'chat' changed from 1.00 to 0.00: the depth policy restarts for this class"
    ]
    (report,) = traffic.report()
    assert (report.drifts, report.drift) == (1, (1.0, 0.0))

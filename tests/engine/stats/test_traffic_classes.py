"""What is kept for every class of traffic, and what is said when one changes."""

import logging

import pytest

from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.speculation import SpeculationParams
from paceline.core.worker_status import BreakerState, TrafficStatus
from paceline.engine.stats.tally import BREAKER, DECLINED, NO_DRAFT, NO_ROOM
from paceline.engine.stats.traffic_classes import TrafficClasses, traffic_class
from paceline.speculation.depth.breaker import Breaker, BreakerRule
from paceline.speculation.depth.drift import Change
from paceline.speculation.depth.policy import RoundObservation


def classes(trips: int = 1000) -> TrafficClasses:
    return TrafficClasses(Breaker(BreakerRule(threshold=0.5, trips=trips, window=2)))


def seen(traffic: TrafficClasses, name: str, drafted: int, accepted: int, sequence_id: int = 0) -> list[Change]:
    return traffic.observe([RoundObservation(sequence_id, name, drafted, accepted)], 1.0, advantage=0.5)


def reports(traffic: TrafficClasses) -> dict[str, TrafficStatus]:
    return {f"{report.method}/{report.category}": report for report in traffic.report()}


def test_a_class_is_a_method_and_a_category() -> None:
    sequence = Sequence(0, "r", [1], 1, SamplingParams(), SpeculationParams(), 0, category="code", method="ngram")
    assert traffic_class(sequence) == "ngram/code"


def test_rounds_count_for_their_own_class() -> None:
    traffic = classes()
    seen(traffic, "a/chat", 3, 2)
    seen(traffic, "a/code", 3, 0)
    seen(traffic, "a/code", 0, 0)
    chat, code = reports(traffic)["a/chat"], reports(traffic)["a/code"]
    assert (chat.tested, chat.kept, chat.fallbacks[NO_DRAFT]) == (3, 2, 0)
    assert (code.tested, code.kept, code.fallbacks[NO_DRAFT]) == (1, 0, 1)


def test_the_breaker_hears_of_drafts_and_not_of_their_absence() -> None:
    traffic = classes(trips=4)
    for _ in range(8):
        seen(traffic, "a/chat", 0, 0)
    assert traffic.breaker.state("a/chat") is BreakerState.CLOSED
    for _ in range(8):
        seen(traffic, "a/chat", 3, 0)
    assert reports(traffic)["a/chat"].breaker is BreakerState.OPEN


def test_why_nothing_was_drafted() -> None:
    traffic = classes()
    traffic.decided("a/chat", 4, is_allowed=True)
    traffic.decided("a/chat", 0, is_allowed=True)
    traffic.decided("a/chat", 0, is_allowed=False)
    traffic.had_no_room("a/chat")
    (report,) = traffic.report()
    assert {name: count for name, count in report.fallbacks.items() if count} == {DECLINED: 1, BREAKER: 1, NO_ROOM: 1}
    assert report.mean_depth == pytest.approx(4 / 3, rel=0.02)


def test_a_change_is_returned_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    traffic, changes = classes(), []
    with caplog.at_level(logging.WARNING, logger="paceline"):
        for sequence_id in range(100):
            for _ in range(8):
                changes += seen(traffic, "a/chat", 2, 2 if sequence_id < 40 else 0, sequence_id)
            changes += traffic.close([sequence_id])
    (change,) = changes
    assert (change.category, change.before, change.after) == ("a/chat", 1.0, 0.0)
    assert caplog.messages == ["acceptance of a drafts for 'chat' went from 1.00 to 0.00: depth is learned anew"]
    (report,) = traffic.report()
    assert (report.drifts, report.drift) == (1, (1.0, 0.0))

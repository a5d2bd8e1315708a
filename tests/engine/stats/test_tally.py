import pytest

from paceline.core.worker_status import BreakerState
from paceline.engine.stats.tally import BREAKER, DECLINED, FALLBACKS, NO_DRAFT, Tally


def test_nothing_happened_yet() -> None:
    report = Tally().report("ngram", "chat", BreakerState.CLOSED)
    assert (report.method, report.category, report.breaker) == ("ngram", "chat", BreakerState.CLOSED)
    assert (report.alphas, report.mean_depth, report.fallbacks) == ((), 0.0, dict.fromkeys(FALLBACKS, 0))


def test_alpha_counts_what_was_tested() -> None:
    tally = Tally()
    for _ in range(40):
        tally.round(drafted=3, accepted=1)  # tested: 1 yes, 2 no; 3 never
        tally.round(drafted=3, accepted=3)
    alphas = tally.report("", "", BreakerState.CLOSED).alphas
    assert alphas == pytest.approx((1.0, 0.5, 1.0), abs=0.01)


def test_alpha_follows_the_traffic() -> None:
    tally = Tally()
    for _ in range(1000):
        tally.round(1, 1)
    for _ in range(400):
        tally.round(1, 0)
    assert tally.report("", "", BreakerState.CLOSED).alphas[0] < 0.05


def test_a_position_not_drafted_any_more_keeps_its_last_figure() -> None:
    tally = Tally()
    tally.round(2, 2)
    for _ in range(10):
        tally.round(1, 0)
    assert tally.report("", "", BreakerState.CLOSED).alphas == pytest.approx((0.083, 1.0), abs=0.01)


def test_many_decisions_at_once_are_as_many_one_by_one() -> None:
    tallies = one_by_one, at_once = Tally(), Tally()
    for tally in tallies:
        tally.depth(4)
    for _ in range(50):
        one_by_one.depth(0)
        one_by_one.fallback(DECLINED)
    at_once.depth(0, 50)
    at_once.fallback(DECLINED, 50)
    found = [tally.report("", "", BreakerState.CLOSED) for tally in tallies]
    assert found[0].mean_depth == pytest.approx(found[1].mean_depth)
    assert found[0].fallbacks == found[1].fallbacks


def test_mean_depth_and_fallbacks() -> None:
    tally = Tally()
    for depth in (0, 4) * 50:
        tally.depth(depth)
    tally.fallback(BREAKER)
    tally.fallback(NO_DRAFT)
    tally.fallback(NO_DRAFT)
    report = tally.report("", "", BreakerState.OPEN)
    assert report.mean_depth == pytest.approx(2.0, abs=0.02)
    assert {reason: count for reason, count in report.fallbacks.items() if count} == {"breaker": 1, "no_draft": 2}

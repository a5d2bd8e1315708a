import random

from paceline.tools.learn.learner import OfflineLimits, decide_offline

LIMITS = OfflineLimits(margin=0.02, min_samples=8)


def test_a_clear_gain_passes() -> None:
    decision = decide_offline([10] * 20, [8] * 20, LIMITS)
    assert decision.is_better
    assert decision.gain is not None
    assert abs(decision.gain - 0.25) < 1e-9
    assert "+25.0% tokens per round on 20 held-out samples" in decision.reason


def test_a_loss_and_no_change_are_refused() -> None:
    assert not decide_offline([10] * 20, [12] * 20, LIMITS).is_better
    same = decide_offline([10] * 20, [10] * 20, LIMITS)
    assert (same.is_better, same.gain) == (False, 0.0)


def test_a_gain_below_the_margin_is_refused() -> None:
    decision = decide_offline([100] * 20, [99] * 20, LIMITS)
    assert not decision.is_better
    assert "less than the margin" in decision.reason


def test_too_few_samples_are_refused() -> None:
    decision = decide_offline([10] * 7, [1] * 7, LIMITS)
    assert (decision.is_better, decision.gain) == (False, None)
    assert "7 held-out samples, and 8 are needed" in decision.reason
    assert not decide_offline([0] * 20, [0] * 20, LIMITS).is_better


def test_chance_passes_about_one_time_in_twenty() -> None:
    draw = random.Random(0)
    limits = OfflineLimits(margin=0.0, min_samples=8)
    passed = 0
    for _ in range(1000):
        current, candidate = ([draw.randint(5, 15) for _ in range(32)] for _ in range(2))
        passed += decide_offline(current, candidate, limits).is_better
    assert 20 < passed < 90

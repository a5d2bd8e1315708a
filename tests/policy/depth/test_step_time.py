"""The measured costs: curves, draft lines, outliers, drift."""

import random
from dataclasses import replace

import pytest

from paceline.core.errors import InvalidConfig
from paceline.policy.depth.observation import DraftingObservation, StepObservation
from paceline.policy.depth.step_cost import FORGET_STEPS, DraftTime, StepTime


def step(
    batch: int,
    rows: int,
    verify: float,
    depth: int = 0,
    draft: float = 0.0,
    network: float = 0.0,
    prefill: int = 0,
    method: str = "chat",
    is_timed: bool = True,
) -> StepObservation:
    drafting = (DraftingObservation(method, depth, draft),) if depth else ()
    return StepObservation(batch, rows, prefill, drafting, verify, network, (), is_timed)


def test_draft_line_from_two_depths() -> None:
    draft = DraftTime()
    for _ in range(20):
        draft.add(4, 2, 5.0)
        draft.add(4, 6, 13.0)
    line = draft.line(4)
    assert line is not None
    assert line == pytest.approx((1.0, 2.0), abs=0.1)
    assert draft.line(500) == line


def test_draft_time_is_proportional_until_a_second_depth_is_seen() -> None:
    draft = DraftTime()
    assert draft.line(1) is None
    draft.add(1, 2, 4.0)
    assert draft.line(1) == pytest.approx((0.0, 2.0))
    for _ in range(20):
        draft.add(1, 4, 4.0)
    c0, c1 = draft.line(1) or (0.0, 0.0)
    assert c0 + 8 * c1 == pytest.approx(4.0, rel=0.2)


def test_after_an_idle_step_only_a_shorter_time_is_learned() -> None:
    draft = DraftTime()
    draft.add(1, 1, 2.0)
    draft.skip_idle()
    draft.add(1, 1, 8.0)
    assert draft.line(1) == pytest.approx((0.0, 2.0))
    draft.add(1, 1, 8.0)
    assert (draft.line(1) or (0.0, 0.0))[1] > 3.0
    draft.skip_idle()
    draft.add(1, 1, 0.1)
    assert (draft.line(1) or (0.0, 0.0))[1] < 4.0


def test_a_very_slow_first_draft_is_forgotten() -> None:
    draft = DraftTime()
    draft.add(1, 1, 900.0)
    assert not draft.is_settled
    draft.add(1, 4, 4.0)
    assert draft.is_settled
    assert draft.line(1) == pytest.approx((0.0, 1.0))


def test_a_deep_draft_as_fast_as_a_shallow_one_shows_the_slope() -> None:
    draft = DraftTime()
    draft.add(1, 1, 4.0)
    assert not draft.has_slope(1)
    draft.add(1, 8, 4.0)
    assert draft.has_slope(1)
    assert draft.line(1) == pytest.approx((4.0, 0.0), abs=0.2)


def test_each_method_has_its_own_line() -> None:
    times = StepTime()
    for _ in range(5):
        times.observe(step(1, 5, 0.010, depth=4, draft=0.008, method="eagle"))
        times.observe(step(1, 5, 0.010, depth=4, draft=0.0004, method="ngram"))
    costs = times.costs(1)
    assert costs is not None
    assert costs.lines["eagle"].seconds(4) == pytest.approx(0.008)
    assert costs.lines["ngram"].seconds(4) == pytest.approx(0.0004)
    assert times.is_settled("ngram")
    assert not times.is_settled("medusa")


def test_untimed_steps_are_ignored() -> None:
    times = StepTime()
    times.calibrate({1: 0.010, 8: 0.010})
    times.observe(step(1, 5, 0.050, depth=4, draft=0.040, is_timed=False))
    times.observe(step(1, 1, 0.050, is_timed=False))
    assert times.plain(1) == 0.010
    assert times.costs(1) is None
    times.observe(step(1, 5, 0.010, depth=4, draft=0.004))
    costs = times.costs(1)
    assert costs is not None
    assert costs.lines["chat"].seconds(4) == pytest.approx(0.004)


def test_a_draft_is_not_idle_after_an_untimed_step() -> None:
    draft = DraftTime()
    draft.add(1, 1, 2.0)
    draft.skip_idle()
    draft.skip_untimed()
    draft.add(1, 1, 8.0)
    assert (draft.line(1) or (0.0, 0.0))[1] > 3.0


def test_context_adds_the_same_time_at_any_number_of_rows() -> None:
    """A warm-up has no context; steps with a long context do not change the curve."""
    times = StepTime()
    times.calibrate({1: 0.010, 64: 0.020}, per_token=1e-6)
    for tokens in (1000, 20_000) * 8:
        times.observe(replace(step(1, 1, 0.010 + 1e-6 * tokens), context=tokens))
        times.observe(replace(step(1, 5, 0.011 + 1e-6 * tokens, depth=4, draft=0.004), context=tokens))
    assert times.plain(1, 0) == pytest.approx(0.010, rel=0.02)
    assert times.plain(64, 5000) == pytest.approx(0.025, rel=0.02)
    costs = times.costs(1, 5000)
    assert costs is not None
    assert costs.verify(5) == pytest.approx(0.016, rel=0.02)


def test_an_overestimated_cost_of_context_is_corrected() -> None:
    times = StepTime()
    times.calibrate({1: 0.010}, per_token=1e-3)
    for _ in range(40):
        times.observe(replace(step(1, 1, 0.012), context=1000))
    assert times.plain(1, 1000) == pytest.approx(0.012, rel=0.05)
    assert 0.0 < times.plain(1, 0) < 0.010


def test_the_first_steps_set_the_height_of_a_warm_up() -> None:
    """All times of the warm-up are 8% too high: eight plain steps of one size correct every size."""
    times = StepTime()
    times.calibrate(dict.fromkeys((1, 8, 64), 1.08 * 0.004))
    for _ in range(8):
        times.observe(step(1, 1, 0.004))
    for rows in (1, 8, 64):
        assert times.plain(rows) == pytest.approx(0.004, rel=0.01)


def test_nothing_is_known_at_first() -> None:
    times = StepTime()
    assert times.plain(1) is None
    assert times.costs(1) is None
    times.observe(step(1, 1, 0.015))
    assert times.plain(1) == pytest.approx(0.015)
    assert times.costs(1) is None


def test_plain_and_verify_are_separate() -> None:
    times = StepTime()
    for _ in range(20):
        times.observe(step(8, 8, 0.010))
        times.observe(step(2, 8, 0.014, depth=3, draft=0.006, network=0.001))
    costs = times.costs(2)
    assert costs is not None
    assert times.plain(8) == pytest.approx(0.010, rel=0.02)
    assert costs.verify(8) == pytest.approx(0.014, rel=0.02)
    assert costs.network + costs.lines["chat"].seconds(3) == pytest.approx(0.007, rel=0.02)


def test_prefill_steps_are_ignored() -> None:
    times = StepTime()
    times.observe(step(8, 8, 0.010))
    for _ in range(20):
        times.observe(step(8, 8, 0.200, prefill=512))
    assert times.plain(8) == pytest.approx(0.010)


def test_outliers_barely_move_a_mature_estimate() -> None:
    times = StepTime()
    times.calibrate({1: 0.010, 64: 0.020})
    for _ in range(20):
        times.observe(step(1, 1, 0.010))
    times.observe(step(1, 1, 3.0))
    assert times.plain(1) == pytest.approx(0.010, rel=0.05)


def test_follows_a_real_change_also_at_unvisited_rows() -> None:
    times = StepTime()
    times.calibrate({1: 0.010, 5: 0.012, 64: 0.020})
    dice = random.Random(0)
    for i in range(4000):
        slower = min(1.5, 1.0 + i / 4000)
        times.observe(step(1, 5, 0.012 * slower * dice.gauss(1.0, 0.05), depth=4, draft=0.004))
    costs = times.costs(1)
    assert costs is not None
    assert costs.verify(5) == pytest.approx(0.018, rel=0.05)
    assert 0.012 < (times.plain(1) or 0.0) <= 0.0181


def test_noise_alone_does_not_move_unvisited_rows() -> None:
    times = StepTime()
    times.calibrate({1: 0.010, 64: 0.020})
    dice = random.Random(0)
    for _ in range(5000):
        times.observe(step(1, 1, 0.010 * dice.gauss(1.0, 0.1)))
    assert times.plain(64) == pytest.approx(0.020, rel=0.05)


def test_a_measured_batch_is_exact_inside_a_wide_bucket() -> None:
    times = StepTime()
    times.observe(step(67, 67, 0.067))
    times.observe(step(80, 80, 0.080))
    assert times.plain(67) == pytest.approx(0.067)


def test_verify_rows_long_unvisited_are_forgotten() -> None:
    times = StepTime()
    times.calibrate({1: 0.010, 8: 0.010})
    times.observe(step(1, 5, 0.030, depth=4, draft=0.004))
    costs = times.costs(1)
    assert costs is not None
    assert costs.verify(5) > 0.011
    for _ in range(FORGET_STEPS + 1):
        times.observe(step(1, 1, 0.010))
    costs = times.costs(1)
    assert costs is not None
    assert costs.verify(5) == pytest.approx(0.010, rel=0.01)


def test_an_invalid_calibration_is_rejected() -> None:
    with pytest.raises(InvalidConfig, match="rows >= 1"):
        StepTime().calibrate({0: 0.1})

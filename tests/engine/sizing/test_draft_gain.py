import pytest

from paceline.engine.sizing.calibration import expected_gain, measure_gain
from tests.fakes import StepClock, tiny_model
from tests.heads import tiny_eagle


def test_free_rows_and_drafts_gain_all_accepted_tokens() -> None:
    passes = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}
    assert expected_gain(passes, 0.0, alpha=0.5) == pytest.approx(sum(0.5**i for i in range(8)))


def test_rows_that_cost_as_much_as_a_pass_gain_nothing() -> None:
    assert expected_gain({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}, 0.1) < 1.0


def test_the_best_chain_is_chosen() -> None:
    """Two rows cost 1.2, three by interpolation 1.9: one draft is best."""
    passes = {1: 1.0, 2: 1.2, 4: 2.6}
    assert expected_gain(passes, 0.1, alpha=0.7) == pytest.approx(1.7 / 1.3)


def test_a_head_is_measured() -> None:
    target = tiny_model()
    head = tiny_eagle(target)
    gain = measure_gain(target, head, StepClock())  # every pass and every chain of four takes a millisecond
    assert gain == pytest.approx(max(sum(0.7**i for i in range(d + 1)) / (1 + d / 4) for d in range(1, 8)))

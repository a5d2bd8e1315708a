"""Against the exact values of the formulas, worked out by hand or published."""

import pytest

from paceline.policy.cost.speculation import GivenCosts, expected_tokens, mean_alpha, speedup


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [(0.7, (2.53, 2.94, 3.14, 3.27)), (0.8, (2.95, 3.69, 4.16, 4.57)), (0.9, (3.44, 4.69, 5.70, 6.86))],
)
def test_expected_tokens_with_constant_alpha(alpha: float, expected: tuple[float, ...]) -> None:
    for depth, tokens in zip((3, 5, 7, 10), expected, strict=True):
        assert expected_tokens((alpha,), depth) == pytest.approx((1 - alpha ** (depth + 1)) / (1 - alpha))
        assert expected_tokens((alpha,), depth) == pytest.approx(tokens, abs=0.005)


def test_expected_tokens_by_position_and_at_the_ends() -> None:
    assert expected_tokens((0.5, 0.8), 3) == pytest.approx(1 + 0.5 + 0.4 + 0.32)  # the last alpha repeats
    assert expected_tokens((0.5,), 0) == 1.0
    assert expected_tokens((1.0,), 6) == 7.0
    assert expected_tokens((0.0,), 6) == 1.0


def test_mean_alpha_is_accepted_over_tested() -> None:
    assert mean_alpha((0.775,), 7) == pytest.approx(0.775)
    assert (expected_tokens((0.775,), 7) - 1) / 7 == pytest.approx(0.41, abs=0.005)  # accepted / drafted
    assert mean_alpha((0.9, 0.5), 2) == pytest.approx((0.9 + 0.45) / (1 + 0.9))


def test_given_costs_are_linear_between_points_and_constant_outside() -> None:
    costs = GivenCosts({2: 1.0, 4: 3.0, 8: 3.0}, {1: 0.5, 3: 1.5})
    assert [costs.verify(rows) for rows in (1, 2, 3, 4, 6, 100)] == [1.0, 1.0, 2.0, 3.0, 3.0, 3.0]
    assert [costs.draft(8, depth) for depth in (1, 2, 9)] == [0.5, 1.0, 1.5]


def test_the_speedup_is_that_of_a_round_over_plain_steps() -> None:
    costs = GivenCosts({8: 0.012, 48: 0.020}, {0: 0.0, 10: 0.020})
    assert speedup(costs, (0.8,), 8, 5) == pytest.approx(expected_tokens((0.8,), 5) * 12 / (10 + 20))

import pytest

from paceline.policy.cost.curve import Curve, DecayingMean, LinearFit, isotonic


def test_a_curve_interpolates_and_has_bends() -> None:
    curve = Curve([(8, 2.0), (16, 3.0), (4, 2.0)], "slope")
    assert [curve(rows) for rows in (1, 4, 6, 8, 12, 16)] == pytest.approx([2.0, 2.0, 2.0, 2.0, 2.5, 3.0])
    assert curve.bends == [8]


def test_a_curve_returns_its_points() -> None:
    points = [(7, 0.1), (11, 0.3), (61, 0.7), (100, 0.9)]
    curve = Curve(points, "flat")
    assert [(x, curve(x)) for x, _ in points] == points


@pytest.mark.parametrize(("beyond", "value"), [("flat", 3.0), ("proportional", 4.5), ("slope", 4.0)])
def test_forms_beyond_the_last_point(beyond, value) -> None:
    assert Curve([(4, 2.0), (8, 2.0), (16, 3.0)], beyond)(24) == pytest.approx(value)


def test_a_slope_is_at_most_in_proportion() -> None:
    assert Curve([(64, 1.0), (65, 2.0)], "slope")(130) == pytest.approx(4.0)
    assert Curve([(64, 1.0)], "slope")(640) == 1.0


def test_isotonic_values_never_decrease() -> None:
    points = isotonic([(1, 1.0, 1), (2, 3.0, 1), (3, 2.0, 3), (4, 4.0, 1)])
    assert points == [(1, 1.0), (2, 2.25), (3, 2.25), (4, 4.0)]


def test_a_line_from_two_depths() -> None:
    fit = LinearFit(1.0 - 1.0 / 32.0)
    for _ in range(20):
        fit.add(2, 5.0)
        fit.add(6, 13.0)
    assert fit.has_spread(0.02)
    assert fit.cost(0.02) == pytest.approx((1.0, 2.0), abs=0.1)
    assert fit.at(10, 0.25) == pytest.approx(21.0)


def test_a_line_through_one_x_is_flat_or_proportional() -> None:
    fit = LinearFit(0.5)
    fit.add(4, 8.0)
    assert not fit.has_spread(0.02)
    assert fit.at(100, 0.25) == 8.0
    assert fit.cost(0.02).seconds(2) == pytest.approx(4.0, rel=0.05)


def test_a_mean_of_decaying_sums() -> None:
    mean = DecayingMean(keep=0.5)
    assert mean.value(7.0) == 7.0
    mean.add(4.0, 1.0, now=3.0)
    mean.add(1.0, 1.0, now=5.0)
    assert (mean.value(7.0), mean.measured) == (2.0, 5.0)

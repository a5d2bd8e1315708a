"""`allocate` against exhaustive search."""

import random
from itertools import accumulate, product
from operator import mul

import pytest

from paceline.core.traffic import TrafficClass
from paceline.policy.cost.curve import Curve, LinearCost
from paceline.policy.depth.allocation import Value, allocate
from paceline.policy.depth.observation import DepthCandidate
from paceline.policy.depth.step_cost import Costs
from tests.traffic import CHAT, traffic_class

ONE = traffic_class("one/a"), traffic_class("one/b")
SEVERAL = traffic_class("one/a"), traffic_class("two/a"), traffic_class("two/b")


def rate(
    batch: list[DepthCandidate], depths: tuple[int, ...], values: dict[TrafficClass, Value], costs: Costs
) -> float:
    tokens, rows = float(len(batch)), float(len(batch))
    deepest: dict[str, int] = {}
    for candidate, depth in zip(batch, depths, strict=True):
        value, method = values[candidate.traffic], candidate.traffic.method
        tokens += value.delivery * sum(value.survival[:depth])
        rows += value.delivery * depth
        deepest[method] = max(depth, deepest.get(method, 0))
    drafting = sum(costs.lines[method].seconds(depth) for method, depth in deepest.items() if depth)
    return tokens / (costs.verify(rows) + costs.network + drafting)


@pytest.mark.parametrize("seed", range(40))
def test_finds_the_best_of_all_allocations(seed: int) -> None:
    dice = random.Random(seed)
    batch = [DepthCandidate(i, dice.choice(ONE), dice.randint(0, 3)) for i in range(5)]
    values = {
        # A delivery under 1 puts the last draft before a bend beside it, not on it: there the search is approximate.
        name: Value(tuple(accumulate((dice.uniform(0.4, 1.0) for _ in range(3)), mul)))
        for name in dict.fromkeys(candidate.traffic for candidate in batch)
    }
    seconds = list(accumulate(dice.choice((0.0, 0.1, 1.0)) for _ in range(6)))
    points = [(rows, 5.0 + extra) for rows, extra in zip((1, 6, 8, 11, 15, 20), seconds, strict=True)]
    costs = Costs(Curve(points, "slope"), 1.0, 0.0, 0.0, {"one": LinearCost(dice.uniform(0, 1), dice.uniform(0, 0.5))})
    found = allocate(batch, values, costs)
    options = [d for d in product(*(range(candidate.max_depth + 1) for candidate in batch)) if any(d)]
    if not options:
        assert found is None
        return
    best = max(rate(batch, depths, values, costs) for depths in options)
    assert found is not None
    assert found.rate == pytest.approx(best)
    assert rate(batch, tuple(found.depths), values, costs) == pytest.approx(best)


def test_fills_the_rows_that_cost_nothing_and_no_more() -> None:
    """64 sequences, rows free up to 96 and expensive beyond: 32 sequences get one draft."""
    batch = [DepthCandidate(i, CHAT, 8) for i in range(64)]
    costs = Costs(Curve([(1, 10.0), (96, 10.0), (192, 40.0)], "slope"), 1.0, 0.0, 0.0, {"chat": LinearCost(0.1, 0.1)})
    found = allocate(batch, {CHAT: Value((0.8, 0.64, 0.5))}, costs)
    assert found is not None
    assert found.depths == [1] * 32 + [0] * 32


def test_a_low_delivery_lowers_the_rate() -> None:
    batch = [DepthCandidate(0, CHAT, 4)]
    costs = Costs(Curve([(1, 10.0)], "slope"), 1.0, 0.0, 1.0, {"chat": LinearCost(0.0, 0.0)})
    often = allocate(batch, {CHAT: Value((0.8, 0.64))}, costs)
    rarely = allocate(batch, {CHAT: Value((0.8, 0.64), delivery=0.05)}, costs)
    assert often is not None
    assert rarely is not None
    assert often.rate == pytest.approx(2.44 / 11)
    assert rarely.rate == pytest.approx((1 + 0.05 * 1.44) / 11)


def test_no_allocation_if_no_candidate_may_draft() -> None:
    costs = Costs(Curve([(1, 1.0)], "slope"), 1.0, 0.0, 0.0, {})
    assert allocate([DepthCandidate(0, CHAT, 0)], {CHAT: Value((0.8,))}, costs) is None


@pytest.mark.parametrize("seed", range(40))
def test_several_methods_are_near_the_best(seed: int) -> None:
    """Methods take turns in the search, which is then approximate."""
    dice = random.Random(seed)
    batch = [DepthCandidate(i, dice.choice(SEVERAL), dice.randint(0, 4)) for i in range(5)]
    values = {
        name: Value(tuple(accumulate((dice.uniform(0.4, 1.0) for _ in range(4)), mul)))
        for name in dict.fromkeys(candidate.traffic for candidate in batch)
    }
    lines = {name: LinearCost(dice.uniform(0, 2), dice.uniform(0, 0.5)) for name in ("one", "two")}
    costs = Costs(Curve([(1, 5.0), (10, 5.0), (25, 8.0)], "slope"), 1.0, 0.0, 0.2, lines)
    found = allocate(batch, values, costs)
    options = [d for d in product(*(range(candidate.max_depth + 1) for candidate in batch)) if any(d)]
    best = max(rate(batch, depths, values, costs) for depths in options)
    assert found is not None
    assert found.rate == pytest.approx(rate(batch, tuple(found.depths), values, costs))
    assert found.rate > 0.98 * best


def test_with_a_long_context_more_rows_pay() -> None:
    batch, values = [DepthCandidate(0, CHAT, 8)], {CHAT: Value(tuple(0.8**k for k in range(1, 9)))}
    curve, lines = Curve([(1, 1.0), (9, 9.0)], "slope"), {"chat": LinearCost(0.0, 0.5)}
    found = [allocate(batch, values, Costs(curve, 1.0, context, 0.0, lines)) for context in (0.0, 50.0)]
    assert [plan is not None and plan.depths for plan in found] == [[1], [8]]


def test_an_expensive_method_does_not_draft_beside_a_cheap_one() -> None:
    batch = [DepthCandidate(0, traffic_class("ngram/chat"), 4), DepthCandidate(1, traffic_class("eagle/chat"), 4)]
    values = {traffic_class("ngram/chat"): Value((0.8, 0.6)), traffic_class("eagle/chat"): Value((0.8, 0.6))}
    curve = Curve([(1, 10.0)], "slope")
    cheap, expensive = LinearCost(0.1, 0.0), LinearCost(9.0, 0.5)
    found = allocate(batch, values, Costs(curve, 1.0, 0.0, 0.0, {"ngram": cheap, "eagle": expensive}))
    both = allocate(batch, values, Costs(curve, 1.0, 0.0, 0.0, {"ngram": cheap, "eagle": cheap}))
    assert found is not None
    assert both is not None
    assert found.depths == [2, 0]
    assert both.depths == [2, 2]


def test_the_size_of_a_tree_depends_on_the_cost_of_a_row() -> None:
    """Late nodes are rarely accepted; cheap rows are used for them all the same."""
    survival = tuple(0.5 / (1 + r) for r in range(31))
    batch = [DepthCandidate(0, traffic_class("eagle/chat"), 31)]
    for per_row, least, most in ((0.0, 31, 31), (0.2, 6, 20), (2.0, 1, 3)):
        costs = Costs(
            Curve([(1, 10.0), (64, 10.0 + 63 * per_row)], "slope"), 1.0, 0.0, 0.0, {"eagle": LinearCost(1.0, 0.0)}
        )
        found = allocate(batch, {batch[0].traffic: Value(survival)}, costs)
        assert found is not None
        assert least <= found.depths[0] <= most
        assert found.rate == pytest.approx(
            max(rate(batch, (n,), {batch[0].traffic: Value(survival)}, costs) for n in range(1, 32))
        )

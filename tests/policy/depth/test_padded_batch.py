"""`PaddedBatch.allocate` against a search of all depths."""

import random
from dataclasses import replace
from itertools import accumulate
from operator import mul

import pytest

from paceline.policy.cost.curve import Curve, LinearCost
from paceline.policy.depth.allocation import FLAT_SHARE, PaddedBatch, Value
from paceline.policy.depth.observation import DepthCandidate
from paceline.policy.depth.step_cost import Costs
from tests.traffic import traffic_class

ONE = traffic_class("one")
CLASSES = traffic_class("one/a"), traffic_class("one/b")
CHAINS = PaddedBatch(frozenset({"one"}), lambda batch: -(-batch // 4) * 4, lambda depth: depth)
TREES = PaddedBatch(
    frozenset({"one"}), lambda batch: batch, lambda depth: next(n for n in (1, 3, 7) if n >= 0.8 * depth)
)


def costs(dice: random.Random) -> Costs:
    seconds = accumulate(dice.choice((0.0, 0.5, 2.0)) for _ in range(6))
    points = [(rows, 5.0 + extra) for rows, extra in zip((1, 8, 12, 20, 32, 48), seconds, strict=True)]
    return Costs(Curve(points, "slope"), 1.0, 0.3, 0.1, {"one": LinearCost(dice.uniform(0, 1), dice.uniform(0, 0.5))})


@pytest.mark.parametrize("shape", [CHAINS, TREES], ids=["chains", "trees"])
@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("seed", range(20))
def test_finds_the_best_depth_and_for_several_sequences_the_shallowest_of_about_the_best(
    shape: PaddedBatch, seed: int, count: int
) -> None:
    dice = random.Random(seed)
    batch = [DepthCandidate(i, dice.choice(CLASSES), dice.randint(count == 1, 6)) for i in range(count)]
    survival = {name: tuple(accumulate((dice.uniform(0.6, 1) for _ in range(7)), mul)) for name in CLASSES}
    values = {name: Value(survival[name], dice.uniform(0.5, 1.0)) for name in CLASSES}
    expected_costs = costs(dice)

    def rate(depth: int) -> float:
        nodes = shape.nodes(depth)
        tokens = count + sum(
            values[c.traffic].delivery * sum(survival[c.traffic][: min(nodes, c.max_depth)]) for c in batch
        )
        return tokens / (
            expected_costs.verify(shape.slots(count) * (1 + nodes)) + 0.1 + expected_costs.lines["one"].seconds(nodes)
        )

    found = shape.allocate(batch, values, expected_costs)
    rates = [rate(depth) for depth in range(1, max(c.max_depth for c in batch) + 1)]
    needed = max(rates) * (1.0 if count == 1 else 1.0 - FLAT_SHARE)
    expected = next(depth for depth, one in enumerate(rates, 1) if one >= needed)
    assert found is not None
    assert found.rate == pytest.approx(rates[expected - 1])
    assert found.depths == [min(shape.nodes(expected), candidate.max_depth) for candidate in batch]


def test_no_allocation_if_no_candidate_may_draft() -> None:
    expected_costs = costs(random.Random(0))
    assert CHAINS.allocate([DepthCandidate(0, ONE, 0)], {ONE: Value((0.9,))}, expected_costs) is None
    assert CHAINS.allocate([DepthCandidate(0, traffic_class("two"), 4)], {}, expected_costs) is None


@pytest.mark.parametrize(("max_draft_tokens", "deepest"), [(100, 6), (24, 3), (23, 2), (7, None)])
def test_a_step_has_a_limit_of_draft_tokens(max_draft_tokens: int, deepest: int | None) -> None:
    shape = replace(CHAINS, max_draft_tokens=max_draft_tokens)  # eight slots
    flat = Costs(Curve([(1, 5.0), (100, 5.0)], "slope"), 1.0, 0.0, 0.0, {"one": LinearCost(0.0, 0.0)})
    found = shape.allocate([DepthCandidate(i, ONE, 6) for i in range(6)], {ONE: Value((0.9,) * 6)}, flat)
    assert (None if found is None else max(found.depths)) == deepest


def test_drafts_without_value_are_left_out() -> None:
    found = CHAINS.allocate([DepthCandidate(0, ONE, 4)], {ONE: Value((0.005, 0.001))}, costs(random.Random(0)))
    assert found is None


def test_covers_batches_of_its_methods() -> None:
    assert CHAINS.covers([DepthCandidate(0, traffic_class("one/a"), 4), DepthCandidate(1, traffic_class("one/b"), 2)])
    assert CHAINS.covers([DepthCandidate(0, traffic_class("one/a"), 4), DepthCandidate(1, traffic_class("two/a"), 0)])
    assert not CHAINS.covers(
        [DepthCandidate(0, traffic_class("one/a"), 4), DepthCandidate(1, traffic_class("two/a"), 2)]
    )

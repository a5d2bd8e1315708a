"""After a change of a category, estimates start from the new level and the category is probed at once."""

import pytest

from paceline.core.traffic import TrafficClass
from paceline.policy.depth.acceptance import Acceptance
from paceline.policy.depth.goodput import GoodputDepth
from paceline.policy.depth.observation import DepthCandidate, RoundObservation, StepObservation
from paceline.policy.depth.probing import Probing
from paceline.policy.depth.rules import AdditiveDepth, FixedDepth, ThresholdDepth
from tests.traffic import traffic_class

A, B = traffic_class("m/a"), traffic_class("m/b")


def step(*rounds: tuple[TrafficClass, int, int]) -> StepObservation:
    seen = tuple(
        RoundObservation(i, traffic, drafted, accepted) for i, (traffic, drafted, accepted) in enumerate(rounds)
    )
    return StepObservation(len(seen), 2 * len(seen), 0, (), 0.01, 0.0, seen)


def test_acceptance_starts_at_the_new_level_and_follows_new_rounds() -> None:
    acceptance = Acceptance(4)
    for _ in range(500):
        acceptance.observe(A, 4, 4, requested=4)
        acceptance.observe(B, 4, 4, requested=4)
    acceptance.restart(A, 0.3)
    assert acceptance.alphas(A) == pytest.approx((0.3,) * 4)
    assert acceptance.survival(A) == pytest.approx((0.3, 0.09, 0.027, 0.0081))
    assert acceptance.alphas(B)[0] > 0.95
    for _ in range(16):
        acceptance.observe(A, 4, 4, requested=4)
    assert acceptance.alphas(A)[0] > 0.7


def test_delivery_is_kept() -> None:
    acceptance = Acceptance(4)
    for i in range(400):
        acceptance.observe(A, 4 if i % 4 == 0 else 0, 0, requested=4)
    before = acceptance.delivery(A)
    acceptance.restart(A, 0.9)
    assert acceptance.delivery(A) == pytest.approx(before)


def test_a_rarely_probed_category_is_due_at_once() -> None:
    probing = Probing()
    probing.pick({A: 0.0})  # registers the category
    for _ in range(6):
        for _ in range(2000):
            probing.begin_step(())
        assert probing.pick({A: 0.0}) == A
        probing.observe(A, 4, 0, 0.0)
    probing.begin_step(())
    assert probing.pick({A: 0.0}) is None
    probing.restart(A)
    assert probing.pick({A: 0.0}) == A


def test_goodput_starts_at_the_new_level() -> None:
    policy = GoodputDepth(4)
    for _ in range(300):
        policy.observe(step((A, 4, 0), (B, 4, 0)))
    policy.restart(A, 0.9)
    assert policy.alphas(A)[0] == pytest.approx(0.9)
    assert policy.alphas(B)[0] < 0.05


@pytest.mark.parametrize("policy", [ThresholdDepth(), AdditiveDepth()])
def test_the_published_rules_start_again(policy: ThresholdDepth | AdditiveDepth) -> None:
    candidates = [DepthCandidate(0, A, 32), DepthCandidate(1, B, 32)]
    start = policy.decide(candidates)
    for _ in range(60):
        policy.observe(step((A, 4, 0), (B, 4, 0)))
    low = policy.decide(candidates)
    assert low[0] < start[0]
    policy.restart(A, 0.5)
    assert policy.decide(candidates) == [start[0], low[1]]


def test_a_fixed_depth_stays() -> None:
    policy = FixedDepth(3)
    policy.restart(A, 0.5)
    assert policy.decide([DepthCandidate(0, A, 8)]) == [3]

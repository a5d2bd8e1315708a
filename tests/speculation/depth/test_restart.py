"""After a change of a category, estimates start from the new level and the category is probed at once."""

import pytest

from paceline.speculation.depth.acceptance import Acceptance
from paceline.speculation.depth.goodput import GoodputDepth
from paceline.speculation.depth.policy import Candidate, RoundObservation, StepObservation
from paceline.speculation.depth.probing import Probing
from paceline.speculation.depth.simple_rules import AdditiveDepth, FixedDepth, ThresholdDepth


def step(*rounds: tuple[str, int, int]) -> StepObservation:
    seen = tuple(
        RoundObservation(i, category, drafted, accepted) for i, (category, drafted, accepted) in enumerate(rounds)
    )
    return StepObservation(len(seen), 2 * len(seen), 0, (), 0.01, 0.0, seen)


def test_acceptance_starts_at_the_new_level_and_follows_new_rounds() -> None:
    acceptance = Acceptance(4)
    for _ in range(500):
        acceptance.observe("a", 4, 4, requested=4)
        acceptance.observe("b", 4, 4, requested=4)
    acceptance.restart("a", 0.3)
    assert acceptance.alphas("a") == pytest.approx((0.3,) * 4)
    assert acceptance.survival("a") == pytest.approx((0.3, 0.09, 0.027, 0.0081))
    assert acceptance.alphas("b")[0] > 0.95
    for _ in range(16):
        acceptance.observe("a", 4, 4, requested=4)
    assert acceptance.alphas("a")[0] > 0.7


def test_delivery_is_kept() -> None:
    acceptance = Acceptance(4)
    for i in range(400):
        acceptance.observe("a", 4 if i % 4 == 0 else 0, 0, requested=4)
    before = acceptance.delivery("a")
    acceptance.restart("a", 0.9)
    assert acceptance.delivery("a") == pytest.approx(before)


def test_a_rarely_probed_category_is_due_at_once() -> None:
    probing = Probing()
    probing.pick({"a": 0.0})  # registers the category
    for _ in range(6):
        for _ in range(2000):
            probing.begin_step(())
        assert probing.pick({"a": 0.0}) == "a"
        probing.observe("a", 4, 0, 0.0)
    probing.begin_step(())
    assert probing.pick({"a": 0.0}) is None
    probing.restart("a")
    assert probing.pick({"a": 0.0}) == "a"


def test_goodput_starts_at_the_new_level() -> None:
    policy = GoodputDepth(4)
    for _ in range(300):
        policy.observe(step(("m/a", 4, 0), ("m/b", 4, 0)))
    policy.restart("m/a", 0.9)
    assert policy.alphas("m/a")[0] == pytest.approx(0.9)
    assert policy.alphas("m/b")[0] < 0.05


@pytest.mark.parametrize("policy", [ThresholdDepth(), AdditiveDepth()])
def test_the_published_rules_start_again(policy: ThresholdDepth | AdditiveDepth) -> None:
    candidates = [Candidate(0, "m/a", 32), Candidate(1, "m/b", 32)]
    start = policy.decide(candidates)
    for _ in range(60):
        policy.observe(step(("m/a", 4, 0), ("m/b", 4, 0)))
    low = policy.decide(candidates)
    assert low[0] < start[0]
    policy.restart("m/a", 0.5)
    assert policy.decide(candidates) == [start[0], low[1]]


def test_a_fixed_depth_stays() -> None:
    policy = FixedDepth(3)
    policy.restart("m/a", 0.5)
    assert policy.decide([Candidate(0, "m/a", 8)]) == [3]

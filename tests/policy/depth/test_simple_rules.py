"""`threshold` and `additive` against traces computed by hand."""

import pytest

from paceline.core.errors import InvalidConfig
from paceline.core.traffic import TrafficClass
from paceline.policy.depth.observation import DepthCandidate, DepthPolicy, RoundObservation, StepObservation
from paceline.policy.depth.rules import AdditiveDepth, ThresholdDepth
from tests.traffic import CHAT, CODE


def step(*rounds: tuple[int, int], traffic: TrafficClass = CHAT) -> StepObservation:
    seen = tuple(RoundObservation(i, traffic, drafted, accepted) for i, (drafted, accepted) in enumerate(rounds))
    rows = len(seen) + sum(r.drafted for r in seen)
    return StepObservation(len(seen), rows, 0, (), 0.01, 0.0, seen)


def depths(policy: DepthPolicy, trace: list[tuple[int, int]]) -> list[int]:
    found = []
    for drafted_accepted in trace:
        policy.observe(step(drafted_accepted))
        found += policy.decide([DepthCandidate(0, CHAT, 99)])
    return found


def test_threshold_waits_for_ten_rounds_then_rises_to_ten() -> None:
    assert depths(ThresholdDepth(), [(5, 5)] * 17) == [5] * 9 + [6, 7, 8, 9, 10, 10, 10, 10]


def test_threshold_keeps_between_eight_and_nine_tenths() -> None:
    assert depths(ThresholdDepth(), [(20, 17)] * 20) == [5] * 20
    assert depths(ThresholdDepth(), [(10, 9)] * 20) == [5] * 20


def test_threshold_steps_down_to_three_between_six_and_eight_tenths() -> None:
    assert depths(ThresholdDepth(), [(10, 7)] * 14) == [5] * 9 + [4, 3, 3, 3, 3]
    assert depths(ThresholdDepth(), [(10, 8)] * 14) == [5] * 9 + [4, 3, 3, 3, 3]


def test_threshold_drops_by_two_to_one_at_six_tenths_or_less() -> None:
    assert depths(ThresholdDepth(), [(10, 6)] * 13) == [5] * 9 + [3, 1, 1, 1]


def test_threshold_forgets_after_a_hundred_rounds() -> None:
    policy = ThresholdDepth()
    assert depths(policy, [(5, 0)] * 100)[-1] == 1
    # mean after n good rounds is n / 100: over 0.9 from the 91st on
    assert depths(policy, [(5, 5)] * 92) == [1] * 90 + [2, 3]


def test_threshold_moves_once_a_step_and_by_category() -> None:
    policy = ThresholdDepth()
    policy.observe(step(*[(5, 5)] * 64))
    assert policy.decide([DepthCandidate(0, CHAT, 99), DepthCandidate(1, CODE, 99), DepthCandidate(2, CHAT, 3)]) == [
        6,
        5,
        3,
    ]


def test_additive_by_hand() -> None:
    good, low = (10, 7), (10, 6)
    trace = [low, low, low, low, good, low, low, good, low, low, low, low, low, low]
    #        6    6    4    4    5     5    5    6     6    6    4    4    4    3
    assert depths(AdditiveDepth(0.65), trace) == [6, 6, 4, 4, 5, 5, 5, 6, 6, 6, 4, 4, 4, 3]


def test_additive_bounds() -> None:
    assert depths(AdditiveDepth(), [(4, 4)] * 12)[-3:] == [16, 16, 16]
    assert depths(AdditiveDepth(), [(4, 0)] * 30)[2::3] == [4, 3, 2, 2, 2, 2, 2, 2, 2, 2]


def test_additive_minimum_is_inclusive_and_validated() -> None:
    assert depths(AdditiveDepth(0.6), [(10, 6)]) == [7]
    with pytest.raises(InvalidConfig, match="draft_acceptance_threshold"):
        AdditiveDepth(65)


def test_additive_counts_a_step_as_one_round() -> None:
    policy = AdditiveDepth()
    policy.observe(step(*[(4, 0)] * 64))
    assert policy.decide([DepthCandidate(0, CHAT, 99)]) == [6]
    policy.observe(step((4, 4), (4, 2)))
    assert policy.decide([DepthCandidate(0, CHAT, 99)]) == [7]


@pytest.mark.parametrize("policy", [ThresholdDepth(), AdditiveDepth()])
def test_plain_rounds_change_nothing(policy: DepthPolicy) -> None:
    before = policy.decide([DepthCandidate(0, CHAT, 99)])
    for _ in range(20):
        policy.observe(step((0, 0)))
    assert policy.decide([DepthCandidate(0, CHAT, 99)]) == before


def test_bounds_are_parameters() -> None:
    assert depths(ThresholdDepth(least=2, most=6), [(5, 5)] * 12) == [5] * 9 + [6, 6, 6]
    assert depths(ThresholdDepth(least=2, most=6), [(5, 0)] * 12) == [5] * 9 + [3, 2, 2]
    assert depths(AdditiveDepth(least=4, most=7), [(4, 4)] * 3) == [7, 7, 7]
    assert depths(AdditiveDepth(least=4, most=7), [(4, 0)] * 9)[2::3] == [4, 4, 4]


def test_a_rule_starts_within_its_bounds() -> None:
    for rule in (ThresholdDepth, AdditiveDepth):
        assert rule(most=2).decide([DepthCandidate(0, CHAT, 99)]) == [2]
        assert rule(least=8).decide([DepthCandidate(0, CHAT, 99)]) == [8]
        assert depths(rule(most=1), [(1, 0)] * 20)[-1] == 1

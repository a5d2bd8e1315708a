"""The depth policy and the breaker of a configuration."""

import pytest

from paceline.core.config import DepthRule, SpeculationConfig
from paceline.core.status import BreakerState
from paceline.policy.depth.goodput import GoodputDepth
from paceline.policy.depth.observation import DepthCandidate
from paceline.policy.depth.rules import AdditiveDepth, FixedDepth, ThresholdDepth, make_breaker, make_depth
from tests.traffic import CHAT


def test_depth_rules() -> None:
    kinds = {"goodput": GoodputDepth, "threshold": ThresholdDepth, "additive": AdditiveDepth, "fixed": FixedDepth}
    for name, kind in kinds.items():
        assert type(make_depth(SpeculationConfig(depth=name), 8)) is kind  # type: ignore[arg-type]
        never = make_depth(SpeculationConfig(depth=name), 0)  # type: ignore[arg-type]
        assert never.decide([DepthCandidate(0, CHAT, 8)]) == [0]
    assert make_depth(SpeculationConfig(depth="fixed"), 5).decide([DepthCandidate(0, CHAT, 8)]) == [5]


@pytest.mark.parametrize(("threshold", "state"), [(None, BreakerState.CLOSED), (0.9, BreakerState.OPEN)])
def test_the_breaker_takes_threshold_and_rounds(threshold: float | None, state: BreakerState) -> None:
    breaker = make_breaker(SpeculationConfig(acceptance_threshold=threshold, breaker_rounds=2))
    for i in range(2 * 16):
        assert breaker.state(CHAT) is BreakerState.CLOSED
        breaker.record(CHAT, drafted=4, accepted=2 if i % 2 else 4, now=0.0)  # alpha 6/7
    assert breaker.state(CHAT) is state


@pytest.mark.parametrize("rule", ["threshold", "additive"])
def test_the_published_rules_open_the_breaker_after_three_low_rounds(rule: DepthRule) -> None:
    breaker = make_breaker(SpeculationConfig(depth=rule, breaker_rounds=3))
    for accepted in (1, 1, 4, 1, 1):  # a good round in between starts the count again
        breaker.record(CHAT, drafted=4, accepted=accepted, now=0.0)
        assert breaker.state(CHAT) is BreakerState.CLOSED
    breaker.record(CHAT, drafted=4, accepted=1, now=0.0)
    assert breaker.state(CHAT) is BreakerState.OPEN


def test_goodput_opens_the_breaker_on_measured_loss() -> None:
    """Low acceptance alone does not, and high acceptance does not prevent it."""
    for gain, accepted, state in ((1.2, 0, BreakerState.CLOSED), (0.9, 4, BreakerState.OPEN)):
        breaker = make_breaker(SpeculationConfig())
        for _ in range(3 * 16):
            breaker.record(CHAT, drafted=4, accepted=accepted, now=0.0, gain=gain)
        assert breaker.state(CHAT) is state

from paceline.core.config import SpeculationConfig
from paceline.core.status import BreakerState
from paceline.core.traffic import TrafficClass
from paceline.policy.depth.observation import RoundObservation
from paceline.tools.orchestrate.orchestrator import METHOD, RoundControl

CLASS = TrafficClass(METHOD, "default")


def run(control: RoundControl, rounds: int, accepted: float, draft: float, verify: float, start: float = 0.0) -> float:
    """Rounds whose drafts are accepted to this share; returns the time after them."""
    now = start
    for i in range(rounds):
        depth = control.depth(0, "default", 50 + i, 1000, now)
        kept = int(accepted * depth)
        took = draft * depth
        now += took + verify
        control.observe(RoundObservation(0, CLASS, depth, kept, depth), took, verify, 50 + i, now, is_first=i == 0)
    return now


def test_cheap_good_drafts_are_deep() -> None:
    control = RoundControl(SpeculationConfig(max_depth=8))
    run(control, 100, accepted=1.0, draft=0.0005, verify=0.020)
    assert control.status().traffic[0].mean_depth > 5
    assert control.counts["accepted"] == control.counts["drafted"] > 300


def test_drafts_that_cost_more_than_they_bring_end() -> None:
    control = RoundControl(SpeculationConfig(max_depth=8))
    now = run(control, 300, accepted=0.0, draft=0.020, verify=0.020)
    before = control.counts["drafted"]
    run(control, 200, accepted=0.0, draft=0.020, verify=0.020, start=now)
    assert control.counts["drafted"] - before <= 20
    assert sum(control.status().traffic[0].fallbacks.values()) > 150


def test_the_last_token_is_never_drafted() -> None:
    control = RoundControl(SpeculationConfig(depth="fixed", max_depth=5))
    assert [control.depth(0, "default", 10, remaining, 0.0) for remaining in (1, 2, 4, 100)] == [0, 1, 3, 5]
    assert RoundControl(SpeculationConfig(enabled=False)).depth(0, "default", 10, 100, 0.0) == 0


def test_a_failed_call_opens_the_breaker_until_its_cool_down() -> None:
    control = RoundControl(SpeculationConfig(depth="fixed", max_depth=5))
    control.record_call(True, now=0.0)
    assert control.depth(0, "default", 10, 100, 1.0) == 0
    assert control.depth(0, "default", 10, 100, 6.0) == 5
    control.record_call(True, now=6.0)
    assert control.depth(0, "default", 10, 100, 12.0) == 0  # the cool-down doubles
    assert control.depth(0, "default", 10, 100, 17.0) == 5
    control.record_call(False, now=17.0)
    assert control.depth(0, "default", 10, 100, 17.1) == 5
    assert control.counts["failed_drafts"] == 2
    assert control.status().traffic[0].breaker is BreakerState.CLOSED

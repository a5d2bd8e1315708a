import pytest

from paceline.engine.step.step import HostReason
from paceline.policy.cost.symptoms import HOST_REMEDIES, Measurements, SymptomWatch, symptoms

HEALTHY = Measurements(
    accepted=3.0,
    depth=5.0,
    draft_seconds=0.01,
    verify_seconds=0.015,
    round_trip=0.001,
    preemptions=0.0,
    host_share=0.05,
)

CASES = {
    "low_acceptance": (Measurements(accepted=1.2, depth=5.0), 1.2, 2.0),
    "slow_draft": (Measurements(draft_seconds=0.02, verify_seconds=0.015), 0.02, 0.015),
    "slow_network": (Measurements(draft_seconds=0.01, round_trip=0.012), 0.012, 0.01),
    "kv_pressure": (Measurements(preemptions=0.1), 0.1, 0.0),
    "host_steps": (Measurements(host_share=0.2, host_reason="sampling"), 0.2, 0.05),
}


@pytest.mark.parametrize("name", CASES)
def test_each_failure_mode_has_its_figure_and_remedy(name):
    measurements, figure, limit = CASES[name]
    (symptom,) = symptoms(measurements)
    assert (symptom.name, symptom.figure, symptom.limit) == (name, figure, limit)
    assert symptom.remedy
    assert name in str(symptom)
    assert f"{figure:.4g}" in str(symptom)


def test_the_reasons_of_host_steps_are_those_of_the_engine():
    assert set(HOST_REMEDIES) <= set(HostReason)


def test_no_symptoms_without_problems_or_measurements():
    assert symptoms(HEALTHY) == []
    assert symptoms(Measurements()) == []
    assert symptoms(Measurements(accepted=0.9, depth=1.0)) == [], "at depth 1 two cannot be accepted"


def test_persistent_symptom_is_reported_once_until_it_ends():
    watch = SymptomWatch(persistence=3)
    slow = CASES["slow_draft"][0]
    reported = [[s.name for s in watch.observe(slow)] for _ in range(10)]
    assert reported == [[], [], ["slow_draft"], *[[]] * 7]
    assert watch.has("slow_draft")
    for _ in range(2):
        watch.observe(HEALTHY)
    assert watch.has("slow_draft")
    watch.observe(HEALTHY)
    assert watch.active == ()
    assert [len(watch.observe(slow)) for _ in range(3)] == [0, 0, 1], "a new occurrence is reported again"


def test_alternating_measurements_are_not_reported():
    watch = SymptomWatch(persistence=3)
    assert not any(watch.observe(CASES["slow_draft"][0] if i % 2 else HEALTHY) for i in range(50))

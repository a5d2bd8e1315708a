"""Symptoms of drafting inside an engine."""

from paceline.core.request import SpeculationFlags
from paceline.core.status import BreakerState, EngineStatus, TrafficStatus
from paceline.worker.server.symptoms import SYMPTOM_PERSISTENCE as PERSISTENCE
from paceline.worker.server.symptoms import DraftSymptoms


def status(number: int, alphas: tuple[float, ...], draft: float, depth: float = 4.0) -> EngineStatus:
    traffic = TrafficStatus("ngram", "chat", BreakerState.CLOSED, alphas, depth, {}, tested=10 * number)
    seconds = {"draft": draft * number, "verify": 1.0 * number}
    return EngineStatus(1, 0, 0, 8, 0, 0, SpeculationFlags(True, "ngram", 8), (traffic,), seconds=seconds)


def names(alphas: tuple[float, ...], draft: float, depth: float = 4.0, count: int = PERSISTENCE + 1) -> list[str]:
    symptoms = DraftSymptoms()
    for number in range(count):
        symptoms.observe(status(number, alphas, draft, depth))
    return [symptom.name for symptom in symptoms.active]


GOOD, LOW = (0.9, 0.9, 0.9, 0.9), (0.5, 0.4, 0.4)


def test_healthy_drafts_have_no_symptom() -> None:
    assert names(GOOD, draft=0.2) == []


def test_low_acceptance() -> None:
    assert names(LOW, draft=0.2) == ["low_acceptance"]
    assert names(LOW, draft=0.2, depth=1.0) == []  # a depth of 1 cannot have 2 accepted


def test_a_slow_draft() -> None:
    assert names(GOOD, draft=1.2) == ["slow_draft"]


def test_a_symptom_persists_before_it_is_reported() -> None:
    assert names(LOW, draft=1.2, count=PERSISTENCE) == []


def test_without_drafts_a_symptom_stays() -> None:
    symptoms = DraftSymptoms()
    for number in (*range(PERSISTENCE + 1), *[PERSISTENCE] * 10):
        symptoms.observe(status(number, LOW, 0.2))
    assert [symptom.name for symptom in symptoms.active] == ["low_acceptance"]

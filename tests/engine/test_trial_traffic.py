"""Traffic classes of a draft on trial: learned apart, then discarded or adopted."""

from paceline.core.sequence import Origin
from paceline.core.sequence import Sequence as Generation
from paceline.core.traffic import TrafficClass
from paceline.policy.depth.acceptance import PRIOR_ALPHA
from paceline.speculation.drafts.drafts import Draft
from paceline.speculation.proposer import ProposerTraits
from paceline.speculation.verification.verification import Verdict
from tests.engine.step.case import Case


def accept(case: Case, sequence: Generation) -> None:
    """One round whose only drafted token is accepted."""
    verdict = Verdict((0,), (5, 6), (Origin.ACCEPTED, Origin.BONUS))
    case.learn(case.schedule((sequence, 1)), {sequence.id: Draft((5,), (-1,))}, {sequence.id: verdict}, 0.1)


def classes(case: Case) -> list[str]:
    return [f"{status.method}/{status.category}" for status in case.speculator.traffic.report()]


def test_a_trial_starts_classes_of_its_methods() -> None:
    case = Case()
    one, two = case.sequence(), case.sequence(method="two")
    case.speculator.set_trial(["one"], True)
    accept(case, one)
    accept(case, two)
    case.speculator.set_trial(["one"], False)
    accept(case, one)
    assert classes(case) == ["one/default (new draft)", "two/default", "one/default"]


def test_a_proposer_refines_the_class() -> None:
    case = Case()
    case.one.traits = ProposerTraits(traffic_class=lambda traffic, sequence_id: traffic._replace(is_partial=True))
    sequence = case.sequence()
    case.speculator.set_trial(["one"], True)
    accept(case, sequence)
    assert classes(case) == ["one/default (new draft)/partial"]


def test_a_forgotten_trial_restarts_its_classes() -> None:
    case = Case()
    sequence = case.sequence()
    accept(case, sequence)
    case.speculator.set_trial(["one"], True)
    accept(case, sequence)
    case.speculator.forget_trial(["two"])
    assert case.depth.restarted == []
    case.speculator.forget_trial(["one"])
    assert case.depth.restarted == [(TrafficClass("one", "default", on_trial=True), PRIOR_ALPHA)]


def test_an_adopted_trial_restarts_the_classes_of_the_draft_in_use() -> None:
    case = Case()
    sequence = case.sequence()
    case.speculator.set_trial(["one"], True)
    accept(case, sequence)
    case.speculator.adopt_trial(["one"])
    assert case.depth.restarted == [(TrafficClass("one", "default"), 1.0)]

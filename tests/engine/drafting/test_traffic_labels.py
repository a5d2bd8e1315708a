"""Traffic classes of a draft on trial: learned apart, then discarded or adopted."""

from paceline.core.sequence import Origin
from paceline.core.sequence import Sequence as Generation
from paceline.speculation.depth.acceptance import PRIOR_ALPHA
from paceline.speculation.drafts import Draft
from paceline.speculation.proposer import ProposerTraits
from paceline.speculation.verification.verify import Verdict
from tests.engine.drafting.case import Case

LABEL = "+trial"


def accept(case: Case, sequence: Generation) -> None:
    """One round whose only drafted token is accepted."""
    verdict = Verdict((0,), (5, 6), (Origin.ACCEPTED, Origin.BONUS))
    case.learn(case.schedule((sequence, 1)), {sequence.id: Draft((5,), (-1,))}, {sequence.id: verdict}, 0.1)


def classes(case: Case) -> list[str]:
    return [f"{status.method}/{status.category}" for status in case.speculator.traffic.report()]


def test_a_label_starts_classes_of_its_methods() -> None:
    case = Case()
    one, two = case.sequence(), case.sequence(method="two")
    case.speculator.label(["one"], LABEL)
    accept(case, one)
    accept(case, two)
    case.speculator.label(["one"], "")
    accept(case, one)
    assert classes(case) == ["one/default+trial", "two/default", "one/default"]


def test_a_proposer_adds_its_own_label() -> None:
    case = Case()
    case.one.traits = ProposerTraits(label=lambda sequence_id: f"#{sequence_id}")
    sequence = case.sequence()
    case.speculator.label(["one"], LABEL)
    accept(case, sequence)
    assert classes(case) == [f"one/default+trial#{sequence.id}"]


def test_a_forgotten_label_restarts_its_classes() -> None:
    case = Case()
    sequence = case.sequence()
    accept(case, sequence)
    case.speculator.label(["one"], LABEL)
    accept(case, sequence)
    case.speculator.forget_label(["two"], LABEL)
    assert case.depth.restarted == []
    case.speculator.forget_label(["one"], LABEL)
    assert case.depth.restarted == [("one/default+trial", PRIOR_ALPHA)]


def test_an_adopted_label_restarts_the_classes_without_it() -> None:
    case = Case()
    sequence = case.sequence()
    case.speculator.label(["one"], LABEL)
    accept(case, sequence)
    case.speculator.adopt_label(["one"], LABEL)
    assert case.depth.restarted == [("one/default", 1.0)]

"""Depths: the limits of request, server and breaker, and plain steps."""

import pytest

from paceline.core.sequence import Origin
from paceline.core.sequence import Sequence as Generation
from paceline.policy.depth.breaker import BreakerRule
from paceline.speculation.drafts.drafts import Draft
from paceline.speculation.proposer import ProposerTraits
from paceline.speculation.verification.verification import Verdict
from tests.engine.step.case import Case, RecordedDepth


def test_candidates_have_their_tokens_and_what_remains() -> None:
    case = Case()
    sequence = case.sequence()
    sequence.ids += [1] * 7
    case.speculator.decide([sequence])
    (candidate,) = case.depth.candidates[-1]
    assert candidate.num_tokens == len(sequence.ids)
    assert candidate.remaining == case.validator.remaining(sequence)


def test_the_policy_can_be_replaced() -> None:
    case, other = Case(), RecordedDepth()
    sequence = case.sequence()
    case.speculator.depth = other
    case.speculator.prepare_next([sequence])
    assert (len(case.depth.candidates), len(other.candidates)) == (0, 1)


def test_depth_is_the_smallest_limit() -> None:
    case = Case()
    sequences = [
        case.sequence(),
        case.sequence(max_depth=2),
        case.sequence(max_depth=50),
        case.sequence(enabled=False),
        case.sequence(max_tokens=4),
    ]
    case.speculator.prepare_next(sequences)
    assert [sequence.depth for sequence in sequences] == [6, 2, 6, 0, 3]
    (batch,) = case.one.observed
    assert [progress.depth for progress in batch] == [6, 2, 6, 0, 3]
    assert batch[0].ids is sequences[0].ids


def test_a_skipped_step_makes_no_decision_and_counts_as_declined() -> None:
    case = Case()
    sequences = [case.sequence(), case.sequence(), case.sequence(enabled=False)]
    sequences[0].depth = 3
    case.depth.is_skipping = True
    case.speculator.prepare_next(sequences)
    assert [sequence.depth for sequence in sequences] == [0, 0, 0]
    assert case.depth.candidates == []
    (report,) = case.speculator.traffic.report()
    assert report.fallbacks["declined"] == 2


@pytest.mark.parametrize("graph_methods", [frozenset[str](), frozenset({"one"})])
def test_without_room_methods_of_this_machine_are_not_decided_for(graph_methods: frozenset[str]) -> None:
    case = Case(graph_methods=graph_methods)
    drafting, plain = case.sequence(), case.sequence(enabled=False)
    case.speculator.prepare_next([drafting, plain], has_room=False)
    assert case.depth.candidates == []
    assert drafting.depth == plain.depth == 0
    assert [p.sequence_id for p in case.one.observed[-1]] == [drafting.id, plain.id]  # committed tokens are reported
    (report,) = case.speculator.traffic.report()
    assert report.fallbacks["no_room"] == 1


def test_without_room_a_pool_drafts_for_the_step_after() -> None:
    case = Case()
    case.two.traits = ProposerTraits(is_remote=True)
    drafting, pooled = case.sequence(), case.sequence(method="two")
    case.speculator.prepare_next([drafting, pooled], has_room=False)
    assert (drafting.depth, pooled.depth) == (0, 6)


def test_a_sequence_in_prefill_is_not_decided_for() -> None:
    case = Case()
    early = case.sequence()
    early.num_computed = 0
    case.speculator.prepare_next([early])
    assert early.depth == 0
    assert case.one.observed == []


# --- the breaker

RULE = BreakerRule(threshold=0.5, trips=2, window=3, cooldown=5.0)


def lose(case: Case, sequence: Generation, rounds: int, accepted: int = 0) -> None:
    draft = Draft((5, 6), (-1, 0))
    verdict = Verdict((0, 1)[:accepted], (5, 6, 7)[: accepted + 1], (Origin.ACCEPTED,) * accepted + (Origin.BONUS,))
    for _ in range(rounds):
        case.learn(case.schedule((sequence, 2)), {sequence.id: draft}, {sequence.id: verdict}, 0.1)


def test_a_losing_traffic_class_stops_and_the_others_continue() -> None:
    case = Case(rule=RULE)
    bad, other, method = case.sequence("bad"), case.sequence("good"), case.sequence("bad", method="two")
    lose(case, bad, 5)
    case.speculator.prepare_next([bad, other, method])
    assert [s.depth for s in (bad, other, method)] == [6, 6, 6]
    lose(case, bad, 1)
    case.speculator.prepare_next([bad, other, method])
    assert [s.depth for s in (bad, other, method)] == [0, 6, 6]


def test_a_half_open_breaker_allows_one_sequence() -> None:
    case = Case(rule=RULE)
    plain, *sequences = case.sequence(enabled=False), case.sequence(), case.sequence()
    lose(case, sequences[0], 6)
    case.clock.advance(5.0)
    case.speculator.prepare_next([plain, *sequences])
    assert [s.depth for s in (plain, *sequences)] == [0, 6, 0]  # a sequence with speculation probes
    lose(case, sequences[0], 3, accepted=2)
    case.speculator.prepare_next(sequences)
    assert [s.depth for s in sequences] == [6, 6]

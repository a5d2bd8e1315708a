"""The engine's side of speculation: which drafts are requested and kept, what is learned, and when drafting stops."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.core.clock import VirtualClock
from paceline.core.request import Request
from paceline.core.sequence import Origin
from paceline.core.status import BreakerState
from paceline.engine.engine import Engine
from paceline.engine.step.step import Schedule, Scheduled
from paceline.models.runner.runner import ModelRunner, Span
from paceline.policy.depth.breaker import Breaker, BreakerRule
from paceline.policy.depth.observation import DraftingObservation, RoundObservation
from paceline.speculation.drafts.drafts import DraftBatch
from paceline.speculation.proposer import ProposerTraits
from paceline.speculation.proposers.model.draft_model import DraftModelProposer
from paceline.speculation.verification.verification import Verdict
from tests.engine.step.case import VOCAB, Case, chain
from tests.fakes import TINY, draft_model, request, run, tiny_engine, tiny_model
from tests.traffic import traffic_class

# --- proposing


def test_drafts_are_requested_by_method_for_sequences_with_rows() -> None:
    case = Case()
    a, b, c = case.sequence(), case.sequence(method="two"), case.sequence()
    assert case.speculator.propose(case.schedule((a, 2), (b, 3), (c, 0))) == {}
    assert [ids for ids, _ in case.one.collected] == [[a.id]]
    assert [ids for ids, _ in case.two.collected] == [[b.id]]


def test_no_drafts_are_requested_without_rows() -> None:
    case = Case()
    case.speculator.propose(case.schedule((case.sequence(), 0)))
    assert case.one.collected == []


def test_drafts_are_cut_to_their_rows() -> None:
    case = Case(chain(0, 5, 6, 7, 8))
    (draft,) = case.speculator.propose(case.schedule((case.sequence(), 2))).values()
    assert draft.tokens == (5, 6)


def test_drafts_of_other_sequences_are_ignored() -> None:
    case = Case(DraftBatch.chains([(0, [5]), (7, [6])]))
    assert set(case.speculator.propose(case.schedule((case.sequence(), 2)))) == {0}


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [([5, VOCAB], [-1, 0]), ([-1], [-1]), ([5, 6], [-1, 1]), ([5, 5], [-1, -1]), ([5], [-2])],
)
def test_invalid_drafts_are_dropped_and_counted(tokens: list[int], parents: list[int]) -> None:
    case = Case(DraftBatch((0,), (len(tokens),), torch.tensor(tokens), torch.tensor(parents)))
    assert case.speculator.propose(case.schedule((case.sequence(), 4))) == {}
    assert case.speculator.num_invalid == 1


# --- learning


def test_the_depth_policy_observes_the_step() -> None:
    case = Case(DraftBatch((0,), (3,), torch.tensor([5, 6, 7]), torch.tensor([-1, -1, 0])))
    a, b, c = case.sequence("x"), case.sequence("y"), case.sequence()
    c.ids += [1] * 9
    schedule = Schedule((Scheduled(a, 1, 4), Scheduled(b, 1, 2), Scheduled(c, 6, 0)))
    drafts = case.speculator.propose(schedule)
    verdicts = {
        a.id: Verdict((0, 2), (5, 7, 9), (Origin.ACCEPTED, Origin.ACCEPTED, Origin.BONUS)),
        b.id: Verdict((), (4,), (Origin.PLAIN,)),
    }
    case.learn(schedule, drafts, verdicts, verify_seconds=0.125)
    (step,) = case.depth.steps
    assert (step.batch, step.rows, step.prefill_rows, step.verify_seconds) == (2, 5, 6, 0.125)
    assert step.drafting == (DraftingObservation("one", 4, 0.25),)
    assert step.is_timed
    assert step.rounds == (  # a tree counts levels; b had no draft
        RoundObservation(a.id, traffic_class("one/x"), 2, 2, 4, num_nodes=3, path=(0, 2)),
        RoundObservation(b.id, traffic_class("one/y"), 0, 0, 2, num_nodes=0, path=()),
    )


def test_nothing_is_learned_with_speculation_off() -> None:
    case = Case()
    case.speculator.enabled = False
    case.learn(case.schedule(), {}, {}, 0.5)
    assert case.depth.steps == []


# --- preparing the next step


def test_a_proposer_observes_the_picks_of_a_round_once() -> None:
    case = Case()
    a, b = case.sequence(), case.sequence()
    verdicts = {
        a.id: Verdict((0,), (5, 9), (Origin.ACCEPTED, Origin.RECOVERED), picks=(5, 9, 4)),
        b.id: Verdict((), (4,), (Origin.PLAIN,)),
    }
    case.speculator.prepare_next([a, b], verdicts)
    case.speculator.prepare_next([a, b])
    assert [[progress.picks for progress in batch] for batch in case.one.observed] == [[(5, 9, 4), ()], [(), ()]]


def test_a_lazy_proposer_observes_only_sequences_that_draft() -> None:
    case = Case()
    drafting, idle = case.sequence(), case.sequence(enabled=False)
    case.one.traits = ProposerTraits(is_lazy=True)
    case.speculator.prepare_next([drafting, idle])
    assert [[progress.sequence_id for progress in batch] for batch in case.one.observed] == [[drafting.id]]


def test_with_speculation_off_no_proposer_is_called() -> None:
    case = Case()
    sequence = case.sequence()
    sequence.depth = 5
    case.speculator.enabled = False
    case.speculator.prepare_next([sequence])
    assert (sequence.depth, case.one.observed) == (0, [])


def test_a_forgotten_sequence_is_closed_at_its_proposer() -> None:
    case = Case()
    a, b = case.sequence(), case.sequence(method="two")
    a.depth = b.depth = 3
    case.speculator.forget([a, b])
    assert (case.one.closed, case.two.closed, a.depth, b.depth) == ([a.id], [b.id], 0, 0)


# --- the breaker in an engine


class CountedRunner(ModelRunner):
    num_passes = 0

    def forward(self, spans: Sequence[Span], state_layers: tuple[int, ...] = ()) -> Any:
        self.num_passes += 1
        return super().forward(spans, state_layers)


def test_an_always_wrong_draft_costs_nothing_once_the_breaker_is_open() -> None:
    clock = VirtualClock()
    wrong = tiny_model(seed=77)
    runner = CountedRunner(wrong, 64)
    draft = DraftModelProposer(runner, 64, TINY.vocab_size, TINY.vocab_size)
    breaker = Breaker(BreakerRule(threshold=0.3, trips=2, window=4, cooldown=5.0))
    engine = tiny_engine(tiny_model(), draft, depth=3, breaker=breaker, clock=clock)
    target_text = run(tiny_engine(tiny_model()), [long_request("a", 1)]).tokens["a", 0]

    assert decode(engine, long_request("a", 1)) == target_text
    assert breaker.state(traffic_class("fake/default")) is BreakerState.OPEN
    spent = runner.num_passes
    assert 0 < spent < 2 * 4 * 4 + 8  # two windows of four rounds

    decode(engine, long_request("b", 2))  # no draft prefill for new sequences either
    assert (runner.num_passes, draft.num_free_blocks) == (spent, 64)

    clock.advance(5.0)
    decode(engine, long_request("c", 3))  # a failed probe doubles the cool-down
    probed = runner.num_passes
    assert spent < probed < spent + 4 * 4 + 4
    clock.advance(5.0)
    decode(engine, long_request("d", 4))
    assert runner.num_passes == probed
    clock.advance(5.0)
    decode(engine, long_request("e", 5))
    assert runner.num_passes > probed


def test_a_right_draft_closes_the_breaker_again() -> None:
    clock = VirtualClock()
    breaker = Breaker(BreakerRule(threshold=0.3, trips=1, window=4, cooldown=5.0))
    engine = tiny_engine(tiny_model(), draft_model(tiny_model()), depth=3, breaker=breaker, clock=clock)
    for _ in range(4):
        breaker.record(traffic_class("fake/default"), 3, 0, clock.now())
    assert breaker.state(traffic_class("fake/default")) is BreakerState.OPEN
    assert run(engine, [long_request("a", 1)]).drafted == 0
    clock.advance(5.0)
    assert run(engine, [long_request("b", 1)]).drafted > 0
    assert breaker.state(traffic_class("fake/default")) is BreakerState.CLOSED


def test_each_category_has_its_own_breaker() -> None:
    clock = VirtualClock()
    breaker = Breaker(BreakerRule(threshold=0.3, trips=1, window=4, cooldown=5.0))
    engine = tiny_engine(tiny_model(), draft_model(tiny_model(seed=77)), depth=3, breaker=breaker, clock=clock)
    decode(engine, replace(long_request("a", 1), category="prose"))
    assert breaker.state(traffic_class("fake/prose")) is BreakerState.OPEN
    assert breaker.state(traffic_class("fake/code")) is BreakerState.CLOSED


def long_request(name: str, seed: int) -> Request:
    return request(name, [seed, 4, 9, 16, 25, 36, seed + 1], max_tokens=40, temperature=0.0)


def decode(engine: Engine, one: Request) -> list[int]:
    return run(engine, [one]).tokens[one.id, 0]

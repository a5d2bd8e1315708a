"""The engine's side of speculation: who is asked, what is let through, what is learned, and when it stops asking."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from paceline.core.clock import VirtualClock
from paceline.core.config import SpeculationConfig
from paceline.core.output import StepTimes
from paceline.core.request import Request, ValidatedRequest
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Origin
from paceline.core.sequence import Sequence as Generation
from paceline.core.speculation import SpeculationParams
from paceline.core.worker_status import BreakerState
from paceline.engine.engine import Engine
from paceline.engine.executors.executor import NO_DRAFT, SequenceResult, StepResult
from paceline.engine.schedule import Schedule, Scheduled
from paceline.engine.speculator import Speculator
from paceline.engine.validator import Limits, RequestValidator
from paceline.models.runner import ModelRunner, Span
from paceline.speculation.depth.breaker import Breaker, BreakerRule
from paceline.speculation.depth.policy import Candidate, DraftingObservation, RoundObservation, StepObservation
from paceline.speculation.drafts import Draft, DraftBatch, DraftCost, DraftPrefill
from paceline.speculation.proposer import Progress, ProposerTraits
from paceline.speculation.proposers.draft_model import DraftModelProposer
from paceline.speculation.trees.tree import depths
from paceline.speculation.verification.verify import Verdict
from tests.fakes import TINY, draft_model, request, run, tiny_engine, tiny_model

VOCAB = 40


class Scripted:
    """Answers every `collect` with the same batch and remembers what it was told."""

    def __init__(
        self, answer: DraftBatch | None = None, clock: VirtualClock | None = None, seconds: float = 0.0
    ) -> None:
        self.answer, self.clock, self.seconds = answer or DraftBatch.empty(), clock, seconds
        self.cost = DraftCost()
        self.traits = ProposerTraits()
        self.observed: list[list[Progress]] = []
        self.collected: list[tuple[list[int], float]] = []
        self.closed: list[int] = []

    def observe(self, batch: Sequence[Progress]) -> None:
        self.observed.append(list(batch))

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        self.collected.append((list(sequence_ids), deadline))
        if self.clock is not None:
            self.clock.advance(self.seconds)
        return replace(self.answer, cost=self.cost)

    def close(self, sequence_ids: Sequence[int]) -> None:
        self.closed += sequence_ids


class RecordedDepth:
    """Gives every candidate what it may have, and keeps what it was shown."""

    advantage: float | None = None
    resting = False

    def __init__(self) -> None:
        self.steps: list[StepObservation] = []
        self.candidates: list[list[Candidate]] = []

    def observe(self, step: StepObservation) -> None:
        self.steps.append(step)

    def restart(self, category: str, alpha: float) -> None:
        pass

    def skip_step(self, batch: int) -> bool:
        return self.resting

    def decide(self, batch: Sequence[Candidate]) -> list[int]:
        self.candidates.append(list(batch))
        return [candidate.max_depth for candidate in batch]


class GraphRound(NamedTuple):
    sequence: Generation
    asked: int
    levels: int
    accepted: int


NO_TIMES = StepTimes(0.0, 0.0, 0.0)


class House:
    """A speculator with two scripted methods, and sequences made by a real validator."""

    def __init__(
        self,
        answer: DraftBatch | None = None,
        rule: BreakerRule | None = None,
        graph_methods: frozenset[str] = frozenset(),
    ) -> None:
        self.clock = VirtualClock(100.0)
        self.one, self.two = Scripted(answer, self.clock, 0.25), Scripted()
        proposers = {"one": self.one, "two": self.two}
        self.validator = RequestValidator(Limits(VOCAB, 64), SpeculationConfig(max_depth=6), "one", proposers)
        self.depth = RecordedDepth()
        self.speculator = Speculator(
            proposers,
            self.depth,
            Breaker(rule or BreakerRule(threshold=0.0)),
            self.validator,
            self.clock,
            VOCAB,
            graph_methods=graph_methods,
        )

    def sequence(self, category: str = "default", max_tokens: int = 40, **speculation: Any) -> Generation:
        """Past its prompt, about to decode."""
        asked = Request(
            "r", (1, 2, 3), SamplingParams(max_tokens=max_tokens), SpeculationParams(**speculation), category
        )
        (sequence,) = self.validator.sequences(ValidatedRequest.of(asked), 0.0)
        sequence.num_computed = 2
        return sequence

    def plan(self, *rooms: tuple[Generation, int]) -> Schedule:
        return Schedule(tuple(Scheduled(sequence, 1, room) for sequence, room in rooms))

    def learn(
        self, plan: Schedule, drafts: Mapping[int, Draft], verdicts: Mapping[int, Verdict], verify_seconds: float
    ) -> None:
        """A step of the host executor."""
        sequences = []
        for item in plan.items:
            draft, verdict = drafts.get(item.sequence.id, NO_DRAFT), verdicts.get(item.sequence.id)
            levels = max(depths(draft.parents)) if draft else 0
            sequences.append(
                SequenceResult(item.sequence, item.num_tokens, verdict, item.num_draft, len(draft), levels, draft)
            )
        rows = len(verdicts) + sum(len(draft) for draft in drafts.values())
        context = sum(len(item.sequence.ids) for item in plan.items if item.sequence.id in verdicts)
        self.speculator.learn(StepResult(sequences, NO_TIMES, verify_seconds, verify_seconds, rows, context))

    def learn_graph(
        self,
        rounds: Sequence[GraphRound],
        batch: int,
        slots: int,
        rows: int,
        draft_seconds: float,
        verify_seconds: float,
        context: int,
        is_timed: bool = True,
    ) -> None:
        """A step of the graph executor: `rounds`, and other sequences that decode plainly."""
        plain = Verdict((), (4,), (Origin.PLAIN,))
        sequences = [SequenceResult(self.sequence(), 1, plain) for _ in range(batch - len(rounds))]
        for sequence, asked, levels, accepted in rounds:
            verdict = Verdict(tuple(range(accepted)), (4,) * (accepted + 1), (Origin.ACCEPTED,) * (accepted + 1))
            sequences.append(SequenceResult(sequence, 1, verdict, asked, asked, levels))
        self.speculator.learn(
            StepResult(
                sequences, NO_TIMES, verify_seconds, verify_seconds, rows, context, draft_seconds, slots, is_timed
            )
        )


def chain(sequence_id: int, *tokens: int) -> DraftBatch:
    return DraftBatch.chains([(sequence_id, list(tokens))])


# --- proposing


def test_only_sequences_with_room_are_asked_and_each_of_its_own_method() -> None:
    house = House()
    a, b, c = house.sequence(), house.sequence(method="two"), house.sequence()
    assert house.speculator.propose(house.plan((a, 2), (b, 3), (c, 0))) == {}
    assert [ids for ids, _ in house.one.collected] == [[a.id]]
    assert [ids for ids, _ in house.two.collected] == [[b.id]]


def test_nobody_is_asked_when_nobody_has_room() -> None:
    house = House()
    house.speculator.propose(house.plan((house.sequence(), 0)))
    assert house.one.collected == []


def test_drafts_are_cut_to_their_room() -> None:
    house = House(chain(0, 5, 6, 7, 8))
    (draft,) = house.speculator.propose(house.plan((house.sequence(), 2))).values()
    assert draft.tokens == (5, 6)


def test_drafts_nobody_asked_for_are_ignored() -> None:
    house = House(DraftBatch.chains([(0, [5]), (7, [6])]))
    assert set(house.speculator.propose(house.plan((house.sequence(), 2)))) == {0}


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [([5, VOCAB], [-1, 0]), ([-1], [-1]), ([5, 6], [-1, 1]), ([5, 5], [-1, -1]), ([5], [-2])],
)
def test_what_is_no_draft_is_dropped_and_counted(tokens: list[int], parents: list[int]) -> None:
    house = House(DraftBatch((0,), (len(tokens),), torch.tensor(tokens), torch.tensor(parents)))
    assert house.speculator.propose(house.plan((house.sequence(), 4))) == {}
    assert house.speculator.num_invalid == 1


def test_time_on_the_way_is_the_networks_and_not_the_drafts() -> None:
    house = House()  # its first method takes a quarter of a second
    sequence, plain = house.sequence(), Verdict((), (4,), (Origin.PLAIN,))
    for network, expected in ((0.1, 0.1), (9.0, 0.25), (0.0, 0.0)):
        house.one.cost = DraftCost(network_seconds=network)
        plan = house.plan((sequence, 1))
        house.speculator.propose(plan)
        house.learn(plan, {}, {sequence.id: plain}, 0.5)
        step = house.depth.steps[-1]
        assert step.network_seconds == pytest.approx(expected)
        assert step.drafting[0].seconds == pytest.approx(0.25 - expected)


def test_drafts_are_waited_for_no_longer_than_the_last_pass_took() -> None:
    house = House()
    sequence = house.sequence()
    house.speculator.propose(house.plan((sequence, 1)))
    assert house.one.collected[-1][1] == 100.0
    house.learn(house.plan(), {}, {}, verify_seconds=0.5)
    now = house.clock.now()
    house.speculator.propose(house.plan((sequence, 1)))
    assert house.one.collected[-1][1] == now + 0.5


# --- learning


def test_a_step_is_reported_as_it_was() -> None:
    house = House(DraftBatch((0,), (3,), torch.tensor([5, 6, 7]), torch.tensor([-1, -1, 0])))
    a, b, c = house.sequence("x"), house.sequence("y"), house.sequence()
    c.ids += [1] * 9
    plan = Schedule((Scheduled(a, 1, 4), Scheduled(b, 1, 2), Scheduled(c, 6, 0)))
    drafts = house.speculator.propose(plan)
    verdicts = {
        a.id: Verdict((0, 2), (5, 7, 9), (Origin.ACCEPTED, Origin.ACCEPTED, Origin.BONUS)),
        b.id: Verdict((), (4,), (Origin.PLAIN,)),
    }
    house.learn(plan, drafts, verdicts, verify_seconds=0.125)
    (step,) = house.depth.steps
    assert (step.batch, step.rows, step.prefill_rows, step.verify_seconds) == (2, 5, 6, 0.125)
    assert step.drafting == (DraftingObservation("one", 4, 0.25),)
    assert step.is_timed
    assert step.rounds == (  # a tree counts levels; b got nothing
        RoundObservation(a.id, "one/x", 2, 2, 4, num_nodes=3, path=(0, 2)),
        RoundObservation(b.id, "one/y", 0, 0, 2, num_nodes=0, path=()),
    )


def test_each_method_answers_for_its_own_seconds() -> None:
    house = House(chain(0, 5, 6))
    house.two.clock, house.two.seconds = house.clock, 0.5
    a, b = house.sequence(), house.sequence(method="two")
    plan = house.plan((a, 2), (b, 3))
    drafts = house.speculator.propose(plan)
    plain = Verdict((), (4,), (Origin.PLAIN,))
    house.learn(plan, drafts, {a.id: plain, b.id: plain}, 0.125)
    (step,) = house.depth.steps
    assert step.drafting == (DraftingObservation("one", 2, 0.25), DraftingObservation("two", 3, 0.5))


def test_draft_prefill_is_no_part_of_drafting() -> None:
    """Neither the prefill of this `collect`, nor one that was reported before it."""
    house = House(chain(0, 5, 6))
    sequence = house.sequence()
    house.speculator.add_draft_prefill("one", DraftPrefill(30, 4.0))
    house.one.cost = DraftCost(DraftPrefill(20, 0.125))
    plan = house.plan((sequence, 2))
    drafts = house.speculator.propose(plan)
    house.learn(plan, drafts, {sequence.id: Verdict((), (4,), (Origin.PLAIN,))}, 0.125)
    (step,) = house.depth.steps
    assert step.drafting == (DraftingObservation("one", 2, 0.125, prefill_tokens=50, prefill_seconds=4.125),)
    assert step.seconds == 4.125 + 0.125 + 0.125


def test_a_draft_prefill_is_reported_with_the_next_step_that_drafts() -> None:
    house = House()
    sequence = house.sequence()
    house.speculator.add_draft_prefill("one", DraftPrefill(30, 0.5))
    house.learn_graph([], 1, 1, 1, draft_seconds=0.0, verify_seconds=0.25, context=9)
    for _ in range(2):
        house.learn_graph([GraphRound(sequence, 4, 4, 2)], 1, 1, 5, draft_seconds=0.5, verify_seconds=0.25, context=9)
    plain, first, second = house.depth.steps
    assert plain.seconds == 0.25
    assert first.drafting == (DraftingObservation("one", 4, 0.5, prefill_tokens=30, prefill_seconds=0.5),)
    assert second.drafting == (DraftingObservation("one", 4, 0.5),)


def test_what_the_device_waited_for_is_told_of_the_round_that_drafts_then() -> None:
    house = House()
    sequence = house.sequence()
    drafts, times = [GraphRound(sequence, 4, 4, 2)], {"draft_seconds": 0.5, "verify_seconds": 0.25, "context": 9}
    house.speculator.graph_paused()
    house.clock.advance(2.0)
    house.speculator.add_draft_prefill("one", DraftPrefill(30, 0.5))  # as part of it
    house.speculator.graph_resumed()
    house.learn_graph(drafts, 1, 8, 40, **times)
    house.speculator.graph_resumed()
    house.learn_graph(drafts, 1, 8, 40, **times)
    house.speculator.graph_paused()
    house.clock.advance(2.0)
    house.speculator.graph_resumed()
    house.learn_graph([], 1, 8, 8, **times)  # plain rounds come home for other reasons
    assert [step.switch_on_seconds for step in house.depth.steps] == [1.5, 0.0, 0.0]
    first = house.depth.steps[0]
    assert first.seconds == 1.5 + 0.5 + 0.5 + 0.25
    assert (first.batch, first.room, first.rows) == (1, 8, 40)


def test_a_step_on_the_host_was_to_be_taken_anyway() -> None:
    house = House()
    sequence = house.sequence()
    house.speculator.graph_paused()
    house.clock.advance(2.0)
    house.learn(house.plan((sequence, 0)), {}, {sequence.id: Verdict((), (4,), (Origin.PLAIN,))}, 0.125)
    house.speculator.graph_resumed()
    house.learn_graph([GraphRound(sequence, 4, 4, 2)], 1, 1, 5, draft_seconds=0.5, verify_seconds=0.25, context=9)
    assert house.depth.steps[-1].switch_on_seconds == 0.0


def test_candidates_say_what_they_have_and_may_have() -> None:
    house = House()
    sequence = house.sequence()
    sequence.ids += [1] * 7
    house.speculator.decide([sequence])
    (candidate,) = house.depth.candidates[-1]
    assert candidate.num_tokens == len(sequence.ids)
    assert candidate.remaining == house.speculator._validator.remaining(sequence)


def test_a_step_on_the_host_tells_no_time_of_a_method_that_runs_ahead() -> None:
    house = House(chain(0, 5, 6), graph_methods=frozenset({"one"}))
    a, b = house.sequence(), house.sequence(method="two")
    plain = Verdict((), (4,), (Origin.PLAIN,))
    house.learn(house.plan((a, 0)), {}, {a.id: plain}, 0.125)
    house.learn(house.plan((b, 0)), {}, {b.id: plain}, 0.125)
    house.learn_graph([GraphRound(a, 4, 4, 2)], 1, 1, 5, draft_seconds=0.5, verify_seconds=0.25, context=9)
    house.learn_graph([], 1, 1, 1, draft_seconds=0.0, verify_seconds=9.0, context=9, is_timed=False)
    assert [step.is_timed for step in house.depth.steps] == [False, True, True, False]
    flown = house.depth.steps[2]
    assert flown.drafting == (DraftingObservation("one", 4, 0.5),)
    assert flown.rounds == (RoundObservation(a.id, "one/default", 4, 2, 4, num_nodes=4, path=(0, 1)),)


def test_nothing_is_learned_while_switched_off() -> None:
    house = House()
    house.speculator.enabled = False
    house.learn(house.plan(), {}, {}, 0.5)
    assert house.depth.steps == []


# --- looking ahead


def test_depth_is_the_least_that_anybody_allows() -> None:
    house = House()
    sequences = [
        house.sequence(),
        house.sequence(max_depth=2),
        house.sequence(max_depth=50),
        house.sequence(enabled=False),
        house.sequence(max_tokens=4),
    ]
    house.speculator.look_ahead(sequences)
    assert [sequence.depth for sequence in sequences] == [6, 2, 6, 0, 3]
    (batch,) = house.one.observed
    assert [progress.depth for progress in batch] == [6, 2, 6, 0, 3]
    assert batch[0].ids is sequences[0].ids


def test_a_proposer_hears_the_picks_of_the_round_once() -> None:
    house = House()
    a, b = house.sequence(), house.sequence()
    verdicts = {
        a.id: Verdict((0,), (5, 9), (Origin.ACCEPTED, Origin.RECOVERED), picks=(5, 9, 4)),
        b.id: Verdict((), (4,), (Origin.PLAIN,)),
    }
    house.speculator.look_ahead([a, b], verdicts)
    house.speculator.look_ahead([a, b])
    assert [[progress.picks for progress in batch] for batch in house.one.observed] == [[(5, 9, 4), ()], [(), ()]]


def test_while_the_policy_rests_it_is_not_asked_and_everybody_counts_as_declined() -> None:
    house = House()
    sequences = [house.sequence(), house.sequence(), house.sequence(enabled=False)]
    sequences[0].depth = 3
    house.depth.resting = True
    house.speculator.look_ahead(sequences)
    assert [sequence.depth for sequence in sequences] == [0, 0, 0]
    assert house.depth.candidates == []
    (report,) = house.speculator.traffic.report()
    assert report.fallbacks["declined"] == 2


def test_a_proposer_may_hear_only_of_those_it_is_asked_for() -> None:
    house = House()
    asked, idle = house.sequence(), house.sequence(enabled=False)
    house.one.traits = ProposerTraits(is_lazy=True)
    house.speculator.look_ahead([asked, idle])
    assert [[progress.sequence_id for progress in batch] for batch in house.one.observed] == [[asked.id]]


def test_without_room_there_is_nothing_to_decide() -> None:
    house = House(graph_methods=frozenset({"one"}))
    asked, quiet = house.sequence(), house.sequence(enabled=False)
    house.speculator.look_ahead([asked, quiet], has_room=False)
    assert house.depth.candidates == []
    assert asked.depth == quiet.depth == 0
    assert [p.sequence_id for p in house.one.observed[-1]] == [asked.id, quiet.id]  # what was committed is told
    (report,) = house.speculator.traffic.report()
    assert report.fallbacks["no_room"] == 1


def test_but_a_pool_drafts_for_the_pass_after_it() -> None:
    house = House(graph_methods=frozenset({"one"}))
    asked, pooled = house.sequence(), house.sequence(method="two")
    house.speculator.look_ahead([asked, pooled], has_room=False)
    assert asked.depth == pooled.depth == 6


def test_a_sequence_in_its_prompt_is_left_out() -> None:
    house = House()
    early = house.sequence()
    early.num_computed = 0
    house.speculator.look_ahead([early])
    assert early.depth == 0
    assert house.one.observed == []


def test_switched_off_nobody_drafts_and_no_proposer_hears() -> None:
    house = House()
    sequence = house.sequence()
    sequence.depth = 5
    house.speculator.enabled = False
    house.speculator.look_ahead([sequence])
    assert (sequence.depth, house.one.observed) == (0, [])


def test_a_forgotten_sequence_is_closed_where_it_was_drafted() -> None:
    house = House()
    a, b = house.sequence(), house.sequence(method="two")
    a.depth = b.depth = 3
    house.speculator.forget([a, b])
    assert (house.one.closed, house.two.closed, a.depth, b.depth) == ([a.id], [b.id], 0, 0)


# --- the breaker

RULE = BreakerRule(threshold=0.5, trips=2, window=3, cooldown=5.0)


def lose(house: House, sequence: Generation, rounds: int, accepted: int = 0) -> None:
    draft = Draft((5, 6), (-1, 0))
    verdict = Verdict((0, 1)[:accepted], (5, 6, 7)[: accepted + 1], (Origin.ACCEPTED,) * accepted + (Origin.BONUS,))
    for _ in range(rounds):
        house.learn(house.plan((sequence, 2)), {sequence.id: draft}, {sequence.id: verdict}, 0.1)


def test_a_class_of_traffic_that_loses_stops_and_the_others_go_on() -> None:
    house = House(rule=RULE)
    bad, other, method = house.sequence("bad"), house.sequence("good"), house.sequence("bad", method="two")
    lose(house, bad, 5)
    house.speculator.look_ahead([bad, other, method])
    assert [s.depth for s in (bad, other, method)] == [6, 6, 6]
    lose(house, bad, 1)
    house.speculator.look_ahead([bad, other, method])
    assert [s.depth for s in (bad, other, method)] == [0, 6, 6]


def test_half_open_one_sequence_probes() -> None:
    house = House(rule=RULE)
    silent, *sequences = house.sequence(enabled=False), house.sequence(), house.sequence()
    lose(house, sequences[0], 6)
    house.clock.advance(5.0)
    house.speculator.look_ahead([silent, *sequences])
    assert [s.depth for s in (silent, *sequences)] == [0, 6, 0]  # the probe goes to one that drafts at all
    lose(house, sequences[0], 3, accepted=2)
    house.speculator.look_ahead(sequences)
    assert [s.depth for s in sequences] == [6, 6]


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
    assert breaker.state("fake/default") is BreakerState.OPEN
    spent = runner.num_passes
    assert 0 < spent < 2 * 4 * 4 + 8  # two windows of four rounds, and no more

    decode(engine, long_request("b", 2))  # no draft prefill for newcomers either
    assert (runner.num_passes, draft.num_free_blocks) == (spent, 64)

    clock.advance(5.0)
    decode(engine, long_request("c", 3))  # probes, loses, and waits twice as long
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
        breaker.record("fake/default", 3, 0, clock.now())
    assert breaker.state("fake/default") is BreakerState.OPEN
    assert run(engine, [long_request("a", 1)]).drafted == 0
    clock.advance(5.0)
    assert run(engine, [long_request("b", 1)]).drafted > 0
    assert breaker.state("fake/default") is BreakerState.CLOSED


def test_traffic_is_told_apart_by_category() -> None:
    clock = VirtualClock()
    breaker = Breaker(BreakerRule(threshold=0.3, trips=1, window=4, cooldown=5.0))
    engine = tiny_engine(tiny_model(), draft_model(tiny_model(seed=77)), depth=3, breaker=breaker, clock=clock)
    decode(engine, replace(long_request("a", 1), category="prose"))
    assert breaker.state("fake/prose") is BreakerState.OPEN
    assert breaker.state("fake/code") is BreakerState.CLOSED


def long_request(name: str, seed: int) -> Request:
    return request(name, [seed, 4, 9, 16, 25, 36, seed + 1], max_tokens=40, temperature=0.0)


def decode(engine: Engine, one: Request) -> list[int]:
    return run(engine, [one]).tokens[one.id, 0]

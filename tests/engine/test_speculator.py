"""The engine's side of speculation: which drafts are requested and kept, what is learned, and when drafting stops."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from paceline.core.clock import VirtualClock
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
    """Returns the same batch from every `collect` and records its calls."""

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
    """Gives every candidate its maximal depth, and records observations."""

    advantage: float | None = None
    is_skipping = False

    def __init__(self) -> None:
        self.steps: list[StepObservation] = []
        self.candidates: list[list[Candidate]] = []

    def observe(self, step: StepObservation) -> None:
        self.steps.append(step)

    def restart(self, category: str, alpha: float) -> None:
        pass

    def skip_step(self, batch: int) -> bool:
        return self.is_skipping

    def decide(self, batch: Sequence[Candidate]) -> list[int]:
        self.candidates.append(list(batch))
        return [candidate.max_depth for candidate in batch]


class GraphRound(NamedTuple):
    sequence: Generation
    asked: int
    levels: int
    accepted: int


NO_TIMES = StepTimes(0.0, 0.0, 0.0)


class Case:
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
        self.validator = RequestValidator(Limits(VOCAB, 64, max_depth=6), "coupled", "one", proposers)
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
        """A sequence with a computed prompt, about to decode."""
        made = Request(
            "r", (1, 2, 3), SamplingParams(max_tokens=max_tokens), SpeculationParams(**speculation), category
        )
        (sequence,) = self.validator.sequences(ValidatedRequest.of(made), 0.0)
        sequence.num_computed = 2
        return sequence

    def schedule(self, *items: tuple[Generation, int]) -> Schedule:
        """One token of each sequence, and rows for so many drafts."""
        return Schedule(tuple(Scheduled(sequence, 1, num_draft) for sequence, num_draft in items))

    def learn(
        self, schedule: Schedule, drafts: Mapping[int, Draft], verdicts: Mapping[int, Verdict], verify_seconds: float
    ) -> None:
        """A step of the host executor."""
        sequences = []
        for item in schedule.items:
            draft, verdict = drafts.get(item.sequence.id, NO_DRAFT), verdicts.get(item.sequence.id)
            levels = max(depths(draft.parents)) if draft else 0
            sequences.append(
                SequenceResult(item.sequence, item.num_tokens, verdict, item.num_draft, len(draft), levels, draft)
            )
        rows = len(verdicts) + sum(len(draft) for draft in drafts.values())
        context = sum(len(item.sequence.ids) for item in schedule.items if item.sequence.id in verdicts)
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


def test_network_time_is_no_part_of_drafting() -> None:
    case = Case()  # its first method takes a quarter of a second
    sequence, plain = case.sequence(), Verdict((), (4,), (Origin.PLAIN,))
    for network, expected in ((0.1, 0.1), (9.0, 0.25), (0.0, 0.0)):
        case.one.cost = DraftCost(network_seconds=network)
        schedule = case.schedule((sequence, 1))
        case.speculator.propose(schedule)
        case.learn(schedule, {}, {sequence.id: plain}, 0.5)
        step = case.depth.steps[-1]
        assert step.network_seconds == pytest.approx(expected)
        assert step.drafting[0].seconds == pytest.approx(0.25 - expected)


def test_the_deadline_is_the_time_of_the_last_pass() -> None:
    case = Case()
    sequence = case.sequence()
    case.speculator.propose(case.schedule((sequence, 1)))
    assert case.one.collected[-1][1] == 100.0
    case.learn(case.schedule(), {}, {}, verify_seconds=0.5)
    now = case.clock.now()
    case.speculator.propose(case.schedule((sequence, 1)))
    assert case.one.collected[-1][1] == now + 0.5


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
        RoundObservation(a.id, "one/x", 2, 2, 4, num_nodes=3, path=(0, 2)),
        RoundObservation(b.id, "one/y", 0, 0, 2, num_nodes=0, path=()),
    )


def test_each_method_has_its_own_seconds() -> None:
    case = Case(chain(0, 5, 6))
    case.two.clock, case.two.seconds = case.clock, 0.5
    a, b = case.sequence(), case.sequence(method="two")
    schedule = case.schedule((a, 2), (b, 3))
    drafts = case.speculator.propose(schedule)
    plain = Verdict((), (4,), (Origin.PLAIN,))
    case.learn(schedule, drafts, {a.id: plain, b.id: plain}, 0.125)
    (step,) = case.depth.steps
    assert step.drafting == (DraftingObservation("one", 2, 0.25), DraftingObservation("two", 3, 0.5))


def test_draft_prefill_is_no_part_of_drafting() -> None:
    """Neither the prefill of this `collect`, nor one that was reported before it."""
    case = Case(chain(0, 5, 6))
    sequence = case.sequence()
    case.speculator.add_draft_prefill("one", DraftPrefill(30, 4.0))
    case.one.cost = DraftCost(DraftPrefill(20, 0.125))
    schedule = case.schedule((sequence, 2))
    drafts = case.speculator.propose(schedule)
    case.learn(schedule, drafts, {sequence.id: Verdict((), (4,), (Origin.PLAIN,))}, 0.125)
    (step,) = case.depth.steps
    assert step.drafting == (DraftingObservation("one", 2, 0.125, prefill_tokens=50, prefill_seconds=4.125),)
    assert step.seconds == 4.125 + 0.125 + 0.125


def test_a_draft_prefill_is_reported_with_the_next_step_that_drafts() -> None:
    case = Case()
    sequence = case.sequence()
    case.speculator.add_draft_prefill("one", DraftPrefill(30, 0.5))
    case.learn_graph([], 1, 1, 1, draft_seconds=0.0, verify_seconds=0.25, context=9)
    for _ in range(2):
        case.learn_graph([GraphRound(sequence, 4, 4, 2)], 1, 1, 5, draft_seconds=0.5, verify_seconds=0.25, context=9)
    plain, first, second = case.depth.steps
    assert plain.seconds == 0.25
    assert first.drafting == (DraftingObservation("one", 4, 0.5, prefill_tokens=30, prefill_seconds=0.5),)
    assert second.drafting == (DraftingObservation("one", 4, 0.5),)


def test_idle_time_before_a_drafting_step_is_its_switch_on_time() -> None:
    case = Case()
    sequence = case.sequence()
    drafts, times = [GraphRound(sequence, 4, 4, 2)], {"draft_seconds": 0.5, "verify_seconds": 0.25, "context": 9}
    case.speculator.graph_paused()
    case.clock.advance(2.0)
    case.speculator.add_draft_prefill("one", DraftPrefill(30, 0.5))  # a part of the idle time
    case.speculator.graph_resumed()
    case.learn_graph(drafts, 1, 8, 40, **times)
    case.speculator.graph_resumed()
    case.learn_graph(drafts, 1, 8, 40, **times)
    case.speculator.graph_paused()
    case.clock.advance(2.0)
    case.speculator.graph_resumed()
    case.learn_graph([], 1, 8, 8, **times)  # a plain step: the graph paused for another reason
    assert [step.switch_on_seconds for step in case.depth.steps] == [1.5, 0.0, 0.0]
    first = case.depth.steps[0]
    assert first.seconds == 1.5 + 0.5 + 0.5 + 0.25
    assert (first.batch, first.num_slots, first.rows) == (1, 8, 40)


def test_a_host_step_in_between_is_no_idle_time() -> None:
    case = Case()
    sequence = case.sequence()
    case.speculator.graph_paused()
    case.clock.advance(2.0)
    case.learn(case.schedule((sequence, 0)), {}, {sequence.id: Verdict((), (4,), (Origin.PLAIN,))}, 0.125)
    case.speculator.graph_resumed()
    case.learn_graph([GraphRound(sequence, 4, 4, 2)], 1, 1, 5, draft_seconds=0.5, verify_seconds=0.25, context=9)
    assert case.depth.steps[-1].switch_on_seconds == 0.0


def test_candidates_have_their_tokens_and_what_remains() -> None:
    case = Case()
    sequence = case.sequence()
    sequence.ids += [1] * 7
    case.speculator.decide([sequence])
    (candidate,) = case.depth.candidates[-1]
    assert candidate.num_tokens == len(sequence.ids)
    assert candidate.remaining == case.speculator._validator.remaining(sequence)


def test_host_steps_of_graph_methods_are_untimed() -> None:
    case = Case(chain(0, 5, 6), graph_methods=frozenset({"one"}))
    a, b = case.sequence(), case.sequence(method="two")
    plain = Verdict((), (4,), (Origin.PLAIN,))
    case.learn(case.schedule((a, 0)), {}, {a.id: plain}, 0.125)
    case.learn(case.schedule((b, 0)), {}, {b.id: plain}, 0.125)
    case.learn_graph([GraphRound(a, 4, 4, 2)], 1, 1, 5, draft_seconds=0.5, verify_seconds=0.25, context=9)
    case.learn_graph([], 1, 1, 1, draft_seconds=0.0, verify_seconds=9.0, context=9, is_timed=False)
    assert [step.is_timed for step in case.depth.steps] == [False, True, True, False]
    graph_step = case.depth.steps[2]
    assert graph_step.drafting == (DraftingObservation("one", 4, 0.5),)
    assert graph_step.rounds == (RoundObservation(a.id, "one/default", 4, 2, 4, num_nodes=4, path=(0, 1)),)


def test_nothing_is_learned_with_speculation_off() -> None:
    case = Case()
    case.speculator.enabled = False
    case.learn(case.schedule(), {}, {}, 0.5)
    assert case.depth.steps == []


# --- preparing the next step


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


def test_a_lazy_proposer_observes_only_sequences_that_draft() -> None:
    case = Case()
    drafting, idle = case.sequence(), case.sequence(enabled=False)
    case.one.traits = ProposerTraits(is_lazy=True)
    case.speculator.prepare_next([drafting, idle])
    assert [[progress.sequence_id for progress in batch] for batch in case.one.observed] == [[drafting.id]]


def test_without_rows_graph_methods_are_not_decided_for() -> None:
    case = Case(graph_methods=frozenset({"one"}))
    drafting, plain = case.sequence(), case.sequence(enabled=False)
    case.speculator.prepare_next([drafting, plain], has_room=False)
    assert case.depth.candidates == []
    assert drafting.depth == plain.depth == 0
    assert [p.sequence_id for p in case.one.observed[-1]] == [drafting.id, plain.id]  # committed tokens are reported
    (report,) = case.speculator.traffic.report()
    assert report.fallbacks["no_room"] == 1


def test_without_rows_a_pool_drafts_for_the_step_after() -> None:
    case = Case(graph_methods=frozenset({"one"}))
    drafting, pooled = case.sequence(), case.sequence(method="two")
    case.speculator.prepare_next([drafting, pooled], has_room=False)
    assert drafting.depth == pooled.depth == 6


def test_a_sequence_in_prefill_is_not_decided_for() -> None:
    case = Case()
    early = case.sequence()
    early.num_computed = 0
    case.speculator.prepare_next([early])
    assert early.depth == 0
    assert case.one.observed == []


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
        breaker.record("fake/default", 3, 0, clock.now())
    assert breaker.state("fake/default") is BreakerState.OPEN
    assert run(engine, [long_request("a", 1)]).drafted == 0
    clock.advance(5.0)
    assert run(engine, [long_request("b", 1)]).drafted > 0
    assert breaker.state("fake/default") is BreakerState.CLOSED


def test_each_category_has_its_own_breaker() -> None:
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

"""A speculator with scripted proposers and a recorded depth policy."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from paceline.core.clock import VirtualClock
from paceline.core.output import StepTimes
from paceline.core.request import Request, SamplingParams, SpeculationParams, ValidatedRequest
from paceline.core.sequence import Origin
from paceline.core.sequence import Sequence as Generation
from paceline.core.traffic import TrafficClass
from paceline.engine.speculator import Speculator
from paceline.engine.step.step import NO_DRAFT, Schedule, Scheduled, SequenceResult, StepResult
from paceline.policy.depth.breaker import Breaker, BreakerRule
from paceline.policy.depth.observation import DepthCandidate, StepObservation
from paceline.requests.validator import Limits, RequestValidator
from paceline.speculation.drafts.drafts import Draft, DraftBatch, DraftCost, depths
from paceline.speculation.proposer import ProposerTraits, SequenceProgress
from paceline.speculation.verification.verification import Verdict

VOCAB = 40


class Scripted:
    """Returns the same batch from every `collect` and records its calls."""

    def __init__(
        self, answer: DraftBatch | None = None, clock: VirtualClock | None = None, seconds: float = 0.0
    ) -> None:
        self.answer, self.clock, self.seconds = answer or DraftBatch.empty(), clock, seconds
        self.cost = DraftCost()
        self.traits = ProposerTraits()
        self.observed: list[list[SequenceProgress]] = []
        self.collected: list[tuple[list[int], float]] = []
        self.closed: list[int] = []

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
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
        self.candidates: list[list[DepthCandidate]] = []
        self.restarted: list[tuple[TrafficClass, float]] = []

    def observe(self, step: StepObservation) -> None:
        self.steps.append(step)

    def restart(self, traffic: TrafficClass, alpha: float) -> None:
        self.restarted.append((traffic, alpha))

    def expect_prompts(self, rows: int) -> None:
        pass

    def skip_step(self, batch: int) -> bool:
        return self.is_skipping

    def decide(self, batch: Sequence[DepthCandidate]) -> list[int]:
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

"""What the depth policy observes of a committed step."""

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from paceline.core.sequence import Sequence
from paceline.core.traffic import TrafficClass
from paceline.engine.drafting.costs import NO_PREFILL, StepCost
from paceline.engine.executors.executor import SequenceResult, StepResult
from paceline.speculation.depth.policy import DraftingObservation, RoundObservation, StepObservation


@dataclass(frozen=True, slots=True)
class StepContents:
    """The sequences of a step by what they did."""

    rounds: list[SequenceResult]
    """Results of the sequences that requested drafts."""
    plain: list[Sequence]
    """Sequences that decoded and requested no draft."""
    prefill_rows: int
    """Rows of prompts, and of drafts that requests brought."""

    @property
    def batch(self) -> int:
        """Number of sequences that decoded."""
        return len(self.rounds) + len(self.plain)

    @classmethod
    def of(cls, result: StepResult) -> "StepContents":
        rounds, plain, prefill_rows = [], [], 0
        for sequence_result in result.sequences:
            if sequence_result.verdict is None or sequence_result.sequence.draft is not None:
                prefill_rows += sequence_result.num_tokens + sequence_result.num_nodes
                continue
            prefill_rows += sequence_result.num_tokens - 1
            if sequence_result.num_reserved:
                rounds.append(sequence_result)
            else:
                plain.append(sequence_result.sequence)
        return cls(rounds, plain, prefill_rows)


def observe_rounds(
    rounds: Iterable[SequenceResult], class_of: Callable[[Sequence], TrafficClass], behind: Container[int]
) -> tuple[RoundObservation, ...]:
    """The outcomes of rounds, by traffic class. `behind` has the ids of sequences whose draft prefill goes on."""
    observed = []
    for sequence_result in rounds:
        assert sequence_result.verdict is not None
        sequence_id, path = sequence_result.sequence.id, sequence_result.verdict.path
        observed.append(
            RoundObservation(
                sequence_id,
                class_of(sequence_result.sequence),
                sequence_result.levels,
                len(path),
                sequence_result.num_reserved,
                sequence_result.num_nodes,
                path,
                sequence_id in behind,
            )
        )
    return tuple(observed)


def observe_step(
    result: StepResult, contents: StepContents, cost: StepCost, rounds: tuple[RoundObservation, ...]
) -> StepObservation:
    """The outcome and the cost of one step, whose rounds are observed as `rounds`."""
    return StepObservation(
        batch=contents.batch,
        rows=result.rows,
        prefill_rows=contents.prefill_rows,
        drafting=_drafting(contents.rounds, cost),
        verify_seconds=result.verify_seconds,
        network_seconds=cost.network_seconds,
        rounds=rounds,
        context=result.context,
        is_timed=cost.is_timed,
        slots=result.slots,
        host_seconds=cost.host_seconds,
        switch_on_seconds=cost.idle_seconds if rounds else 0.0,
    )


def _drafting(rounds: list[SequenceResult], cost: StepCost) -> tuple[DraftingObservation, ...]:
    """The deepest request and the cost of every method."""
    deepest: dict[str, int] = {}
    for sequence_result in rounds:
        method = sequence_result.sequence.method
        deepest[method] = max(deepest.get(method, 0), sequence_result.num_reserved)
    observed = []
    for method, depth in deepest.items():
        prefill = cost.prefills.get(method, NO_PREFILL)
        seconds = cost.draft_seconds.get(method, 0.0)
        observed.append(DraftingObservation(method, depth, seconds, prefill.tokens, prefill.seconds))
    return tuple(observed)

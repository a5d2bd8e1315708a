"""A step in flight on the device, and its outcome by slot."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice

import torch
from torch import Tensor

from paceline.core.clock import Clock
from paceline.core.output import StepTimes
from paceline.core.sequence import Origin, Sequence, Status
from paceline.engine.graph.drafter import DraftShape
from paceline.engine.step.step import SequenceResult, StepResult
from paceline.kernels.gpu.speculation.scores import COLUMNS, read_scores
from paceline.models.device import StreamEvent, staging_tensor
from paceline.speculation.verification import PLAIN, Verdict


@cache
def chain_path(accepted: int) -> tuple[int, ...]:
    """Accepted nodes of a chain, in order."""
    return tuple(range(accepted))


@cache
def origins(accepted: int, is_bonus: bool) -> tuple[Origin, ...]:
    """Origins of the tokens of a step with drafts."""
    return (*(Origin.ACCEPTED,) * accepted, Origin.BONUS if is_bonus else Origin.RECOVERED)


def add_scores(results: list[SequenceResult], first_rows: Seq[int], scored: Tensor) -> None:
    """Add log-probabilities to the results of sequences that want them. `scored` [N, COLUMNS] has a row for each committed
    token, and `first_rows` the first row of each result."""
    by_number: dict[int, list[int]] = {}
    for index, result in enumerate(results):
        if result.sequence.sampling.logprobs is not None and result.verdict is not None:
            by_number.setdefault(result.sequence.sampling.logprobs, []).append(index)
    for number, indices in by_number.items():  # reading many rows together takes half the time
        tokens = [results[index].tokens for index in indices]
        rows = [first_rows[index] + i for index, some in zip(indices, tokens, strict=True) for i in range(len(some))]
        found = iter(read_scores(scored.numpy()[rows], [*chain.from_iterable(tokens)], number))
        for index, some in zip(indices, tokens, strict=True):
            results[index] = results[index]._replace(scores=tuple(islice(found, len(some))))


@dataclass(frozen=True, slots=True)
class SlotResults:
    """The outcome of a step by slot, and the seconds that the device spent on each part."""

    accepted: list[int]
    levels: list[int]
    """Levels drafted."""
    is_bonus: list[bool]
    """Whether every drafted token was accepted."""
    paths: list[tuple[int, ...]]
    """Accepted nodes, in order."""
    tokens: list[list[int]]
    """Committed tokens; -1 after the last."""
    draft_seconds: float
    forward_seconds: float
    sample_seconds: float


class StepBuffers:
    """Pinned host memory and events of one step in flight."""

    def __init__(self, batch: int, max_levels: int, ints: int, device: torch.device) -> None:
        self.control = staging_tensor(ints, dtype=torch.int32, device=device)
        self.report = staging_tensor(3, batch, dtype=torch.int32, device=device)
        self.tokens = staging_tensor(batch * (max_levels + 1), dtype=torch.int64, device=device)
        self.rows = staging_tensor(batch * (max_levels + 1), dtype=torch.int64, device=device)
        self.scores = staging_tensor(batch * (max_levels + 1), COLUMNS, dtype=torch.int32, device=device)
        self.begin, self.drafted, self.verified, self.end = (StreamEvent(device) for _ in range(4))

    @property
    def num_slots(self) -> int:
        """Slots of the padded batch."""
        return self.report.shape[1]

    def tokens_at(self, levels: int) -> Tensor:
        """[B, levels + 1]"""
        return self.tokens[: self.report.shape[1] * (levels + 1)].view(-1, levels + 1)

    def scores_at(self, levels: int) -> Tensor:
        """[B * (levels + 1), COLUMNS]: committed tokens as `score_tokens` scores them."""
        return self.scores[: self.report.shape[1] * (levels + 1)]

    def rows_at(self, levels: int) -> Tensor:
        """[B, levels + 1]: rows of the pass that lie on the committed path."""
        return self.rows[: self.report.shape[1] * (levels + 1)].view(-1, levels + 1)


@dataclass(frozen=True, slots=True, eq=False)
class InflightStep:
    """A step submitted to the device whose outcome the host has not read."""

    shape: DraftShape
    is_tree: bool
    sequences: Seq[Sequence | None]
    """Sequences by slot."""
    limits: Seq[int | None]
    """Draft tokens granted to each slot. None if the slot is empty."""
    buffers: StepBuffers
    is_timed: bool
    """False for the first step of its shape: graphs were captured during it."""
    is_scored: bool = False
    """Whether the step has log-probabilities."""

    @property
    def num_slots(self) -> int:
        return self.buffers.num_slots

    @property
    def kind(self) -> tuple[int, int]:
        """Slots and draft nodes: steps of one kind take about the same time."""
        return self.num_slots, self.shape.nodes

    @property
    def max_tokens(self) -> int:
        """Tokens by which the step may extend a sequence."""
        return self.shape.levels + 1

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Sequences of which the step computes prompt tokens: none."""
        return ()

    def result(self, clock: Clock) -> StepResult:
        """Wait for the step. Sequences that ended while it was in flight are left out."""
        outcome = self.wait()
        sequences, context, running = [], 0, Status.RUNNING
        first_rows = list[int]()
        for slot, (sequence, limit) in enumerate(zip(self.sequences, self.limits, strict=True)):
            if sequence is None or limit is None or sequence.status is not running:
                continue
            accepted = outcome.accepted[slot]
            context += len(sequence.ids)
            verdict = Verdict(
                outcome.paths[slot],
                tuple(outcome.tokens[slot][: accepted + 1]),
                origins(accepted, outcome.is_bonus[slot]) if limit else PLAIN,
            )
            sequences.append(SequenceResult(sequence, 1, verdict, limit, limit, outcome.levels[slot] if limit else 0))
            first_rows.append(slot * self.max_tokens)
        if self.is_scored:
            add_scores(sequences, first_rows, self.buffers.scores_at(self.shape.levels))
        slots, now = self.num_slots, clock.now()
        verify_seconds = outcome.forward_seconds + outcome.sample_seconds
        drafted = now - verify_seconds
        return StepResult(
            sequences=sequences,
            times=StepTimes(drafted - outcome.draft_seconds, drafted, now),
            forward_seconds=outcome.forward_seconds,
            verify_seconds=verify_seconds,
            rows=slots * (self.shape.nodes + 1),
            context=context,
            draft_seconds=outcome.draft_seconds,
            slots=slots,
            is_timed=self.is_timed,
            is_graph=True,
        )

    def wait(self) -> SlotResults:
        """Block until the device has finished the step."""
        buffers = self.buffers
        buffers.end.wait()
        accepted, bonuses, levels = buffers.report.tolist()
        if not self.is_tree:
            levels = [limit or 0 for limit in self.limits]
            is_bonus = [count == level for count, level in zip(accepted, levels, strict=False)]
            paths = [chain_path(count) for count in accepted]
        else:
            is_bonus = [bonus == 1 for bonus in bonuses]
            width = 1 + self.shape.nodes
            first = range(0, len(accepted) * width, width)  # row of each slot's last committed token
            rows = buffers.rows_at(self.shape.levels).tolist()
            paths = [
                tuple(row - root - 1 for row in way[1 : 1 + count])
                for way, count, root in zip(rows, accepted, first, strict=True)
            ]
        return SlotResults(
            accepted,
            levels,
            is_bonus,
            paths,
            buffers.tokens_at(self.shape.levels).tolist(),
            buffers.drafted.seconds_since(buffers.begin),
            buffers.verified.seconds_since(buffers.drafted),
            buffers.end.seconds_since(buffers.verified),
        )

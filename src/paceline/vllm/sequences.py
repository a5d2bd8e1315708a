"""Recognises the sequences of vLLM's batch, which arrive as rows of token ids without request ids.

A row continues a sequence if the tokens of the sequence are a prefix of the row. Two sequences with the same tokens are
interchangeable, because their drafts are the same. A sequence that is in no batch for a while has ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import NDArray

from paceline.core.traffic import TrafficClass
from paceline.vllm.decisions.record import DraftRecord

KEPT_STEPS = 16
"""Steps for which a sequence without a row is kept. vLLM takes preempted and unscheduled requests out of its batch. Texts of
ended sequences become drafts of other sequences."""

NO_TRAFFIC = TrafficClass("", "")
"""The traffic class of a sequence for which nothing was decided yet."""
Tokens = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class TrackedSequence:
    id: int
    num_prompt: int
    ids: list[int] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)
    """`ids` as int32, for comparisons."""
    last_step: int = 0
    """Step in which it last had a row."""
    drafted: int = 0
    """Tokens of the draft that is being verified."""
    requested: int = 0
    """Depth that was requested for it."""
    has_drafted: bool = False
    """Whether its proposer has indexed it."""
    traffic: TrafficClass = NO_TRAFFIC
    """The traffic class in which its last draft was decided."""
    record: DraftRecord = field(default_factory=DraftRecord)

    def extend(self, tokens: Tokens) -> None:
        self.ids.extend(tokens.tolist())
        self.data += tokens.tobytes()

    def is_prefix_of(self, row: Tokens) -> bool:
        """Whether its tokens are the first tokens of `row`."""
        return len(self.ids) <= len(row) and row[: len(self.ids)].tobytes() == self.data


@dataclass(frozen=True, slots=True)
class Matches:
    rows: list[TrackedSequence]
    """The sequence of each row."""
    opened: list[TrackedSequence]
    """Sequences seen for the first time."""
    ended: list[TrackedSequence]
    """Sequences that were in no batch for `KEPT_STEPS` steps."""


class SequenceTable:
    """The sequences that vLLM has decoded lately."""

    def __init__(self, max_growth: int) -> None:
        """A sequence gains at most `max_growth` tokens in a step."""
        self._max_growth = max_growth
        self._ids = count()
        self._rows: list[TrackedSequence] = []
        self._absent: dict[int, TrackedSequence] = {}

    def __len__(self) -> int:
        return len(self._rows) + len(self._absent)

    def append(self, steps: Sequence[Sequence[Sequence[int]]]) -> None:
        """Add the tokens of steps in which every row of the last match gained one token. Does nothing if the rows have
        changed."""
        if steps and len(steps[0]) == len(self._rows):
            tails = np.array(steps, dtype=np.int32)[:, :, 0]
            for i, sequence in enumerate(self._rows):
                sequence.extend(tails[:, i])

    def match(self, tokens: list[Tokens], num_sampled: list[int], step: int) -> Matches:
        """The sequences of `tokens`, one array for each row, of which the last `num_sampled` are new in this step. `step`
        counts all steps, also those without a call."""
        free = {row.id: row for row in self._rows} | self._absent
        found: list[TrackedSequence | None] = [None] * len(tokens)
        for i, (row, old) in enumerate(zip(tokens, self._rows, strict=False)):
            if self._continues(old, row, step):
                found[i] = old
                del free[old.id]
        opened = []
        rows: list[TrackedSequence] = []
        for row, sampled, sequence in zip(tokens, num_sampled, found, strict=True):
            if sequence is None and free:
                sequence = max(
                    (sequence for sequence in free.values() if self._continues(sequence, row, step)),
                    key=lambda sequence: len(sequence.ids),
                    default=None,
                )
                if sequence is not None:
                    del free[sequence.id]
            if sequence is None:
                sequence = TrackedSequence(next(self._ids), len(row) - sampled)
                opened.append(sequence)
            sequence.extend(row[len(sequence.ids) :])
            sequence.last_step = step
            rows.append(sequence)
        ended = [sequence for sequence in free.values() if step - sequence.last_step > KEPT_STEPS]
        self._rows = rows
        self._absent = {sequence.id: sequence for sequence in free.values() if step - sequence.last_step <= KEPT_STEPS}
        return Matches(rows, opened, ended)

    def _continues(self, sequence: TrackedSequence, row: Tokens, step: int) -> bool:
        """Whether the row is the sequence, and not a later request whose prompt starts with its text."""
        growth = len(row) - len(sequence.ids)
        most = self._max_growth * max(1, step - sequence.last_step)
        return 0 <= growth <= most and sequence.is_prefix_of(row)

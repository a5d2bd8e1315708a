"""Recognises the sequences of vLLM's batch, which arrive as rows of token ids without request ids.

A row continues a sequence if the tokens of the sequence are a prefix of the row. Two sequences with the same tokens are
interchangeable, because their drafts are the same. A sequence that is in no batch for a while has ended.

A `Batch` is what vLLM reports after a step: its rows with the tokens just sampled, and the chain that it verifies.
`DraftRecord` counts how often the drafts of one sequence were right.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median_low
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.request import SamplingParams
from paceline.core.traffic import TrafficClass
from paceline.speculation.drafts import Draft

WINDOW = 16.0
"""Draft tokens that a record remembers."""
PRIOR_ALPHA = 0.2
PRIOR_TRIALS = 1.0
CLASSES = (("good", 0.6), ("fair", 0.3), ("poor", 0.0))
"""Categories of sequences, with the least alpha of each."""


@dataclass(slots=True)
class DraftRecord:
    num_trials: float = 0.0
    """Draft tokens that were compared with the text, decayed."""
    num_hits: float = 0.0

    def add(self, drafted: int, accepted: int) -> None:
        """A draft of `drafted` tokens, of which the first `accepted` were right. A lookup without a draft is a failure."""
        trials = max(1, min(drafted, accepted + 1))
        kept = min(1.0, WINDOW / (self.num_trials + trials))
        self.num_trials = self.num_trials * kept + trials
        self.num_hits = self.num_hits * kept + accepted

    def tokens(self, depth: int) -> float:
        """Expected tokens of a step with a draft of `depth` tokens."""
        return sum(self.alpha**k for k in range(depth + 1))

    @property
    def alpha(self) -> float:
        """Probability that a draft token after right tokens is right."""
        return (self.num_hits + PRIOR_ALPHA * PRIOR_TRIALS) / (self.num_trials + PRIOR_TRIALS)


def traffic_classes(method: str, batch: Sequence[DraftRecord]) -> list[TrafficClass]:
    """Traffic classes of the depth policy, by how good the drafts of each sequence were. A sequence without a record counts as
    the median of the remaining sequences, because the texts of a batch are often of one kind."""
    typical = median_low([record.alpha for record in batch if record.num_trials] or [PRIOR_ALPHA])
    return [traffic_class(method, record.alpha if record.num_trials else typical) for record in batch]


def traffic_class(method: str, alpha: float) -> TrafficClass:
    return TrafficClass(method, next(name for name, least in CLASSES if alpha >= least))


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


GREEDY = SamplingParams(temperature=0.0)


class RowSampling(NamedTuple):
    """Sampling parameters of a row, where they are known. A draft made with the same noise is accepted more often."""

    params: SamplingParams = GREEDY
    seed: int = 0


UNKNOWN = RowSampling()


class Batch(NamedTuple):
    """The rows of vLLM's batch after a step."""

    sampled: Sequence[Sequence[int]]
    """Tokens that the step added to each row. Empty while its prompt is computed."""
    lengths: NDArray[np.int32]
    """Tokens of each row."""
    tokens: NDArray[np.int32]
    """[R, max_model_len]"""
    sampling: Sequence[RowSampling] = ()
    """Sampling of each row. Empty if it is not known."""


def first_chain(draft: Draft, depth: int, vocab_size: int) -> tuple[int, ...]:
    """The first child of every node, down to `depth`. The chain ends before a token that the target does not have."""
    chain: list[int] = []
    node = -1
    for child, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if len(chain) == depth or not 0 <= token < vocab_size:
            break
        if parent == node:
            chain.append(token)
            node = child
    return tuple(chain)

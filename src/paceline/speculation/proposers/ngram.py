"""The proposer `ngram` (prompt lookup): it drafts what followed the newest tokens when they last occurred in the text."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.speculation.drafts import DraftBatch
from paceline.speculation.proposer import ProposerTraits, SequenceProgress


@dataclass(slots=True)
class _Index:
    """The position after the last occurrence of each n-gram of a sequence."""

    progress: SequenceProgress
    num_indexed: int = 0
    """Tokens whose n-grams are in `after`; without the newest, so that a suffix does not find itself."""
    after: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramProposer:
    """Matches the longest suffix of `max_ngram` down to `min_ngram` tokens. It needs no model and little memory."""

    traits = ProposerTraits()

    def __init__(self, min_ngram: int = 2, max_ngram: int = 4) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"need 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}")
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._indices: dict[int, _Index] = {}

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        for progress in batch:
            index = self._indices.get(progress.sequence_id)
            if index is None:
                self._indices[progress.sequence_id] = _Index(progress)
            else:
                index.progress = progress

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        indices = ((sequence_id, self._indices.get(sequence_id)) for sequence_id in sequence_ids)
        return DraftBatch.chains((sequence_id, self._lookup(index)) for sequence_id, index in indices if index)

    def close(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self._indices.pop(sequence_id, None)

    def _lookup(self, index: _Index) -> list[int]:
        ids, depth = index.progress.ids, index.progress.depth
        if depth == 0:
            return []
        self._extend(index)
        for size in self._sizes:
            start = index.after.get(tuple(ids[-size:])) if size < len(ids) else None
            if start is not None:
                draft: list[int] = []
                for i in range(start, start + depth):
                    # Past the end the draft continues from itself: a loop in the text is repeated
                    draft.append(ids[i] if i < len(ids) else draft[i - len(ids)])
                return draft
        return []

    def _extend(self, index: _Index) -> None:
        ids, after = index.progress.ids, index.after
        for size in self._sizes:
            start = max(index.num_indexed, size, 1)  # the end of the first new n-gram
            if start < len(ids):
                columns = [ids[start - size + i : len(ids) - size + i] for i in range(size)]
                after.update(zip(zip(*columns, strict=True), range(start, len(ids)), strict=True))
        index.num_indexed = len(ids)

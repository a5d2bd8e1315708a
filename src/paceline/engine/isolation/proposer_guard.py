"""Calls proposers so that a failure costs drafts and never text."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from paceline.speculation.drafts import NO_COST, Draft, DraftBatch, DraftCost
from paceline.speculation.proposer import Proposer, SequenceProgress

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ProposerGuard:
    """If a proposer raises for a batch, it is called again for each sequence. A sequence that raises alone is excluded: it
    decodes without drafts from then on. Its text is the same."""

    def __init__(self, proposers: Mapping[str, Proposer]) -> None:
        self._proposers = proposers
        self._excluded: set[int] = set()
        self.num_failures = 0
        """Calls of a proposer that raised."""

    def excludes(self, sequence_id: int) -> bool:
        """Whether a proposer failed for this sequence."""
        return sequence_id in self._excluded

    def collect(self, method: str, sequence_ids: Sequence[int], deadline: float) -> tuple[dict[int, Draft], DraftCost]:
        """The drafts by sequence, and what the batch cost."""

        def collect(ids: Sequence[int]) -> DraftBatch:
            return self._proposers[method].collect(ids, deadline)

        try:
            batch = collect(sequence_ids)
            return batch.split(), batch.cost
        except Exception as error:
            self._note(method, error)
        drafts: dict[int, Draft] = {}
        for sequence_id in sequence_ids:
            alone = self._alone(method, sequence_id, lambda i=sequence_id: collect([i]).split())  # type: ignore[misc]
            drafts.update(alone or {})
        return drafts, NO_COST

    def observe(self, method: str, batch: Sequence[SequenceProgress]) -> None:
        """Report progress, without that of excluded sequences."""
        if self._excluded:
            batch = [progress for progress in batch if progress.sequence_id not in self._excluded]
        observe = self._proposers[method].observe
        try:
            if batch:
                observe(batch)
            return
        except Exception as error:
            self._note(method, error)
        for progress in batch:
            self._alone(method, progress.sequence_id, lambda progress=progress: observe([progress]))  # type: ignore[misc]

    def close(self, method: str, sequence_id: int) -> None:
        """End the sequence at its proposer. It may start again, after a preemption or with another method."""
        self._excluded.discard(sequence_id)
        self._close(method, sequence_id)

    def _alone(self, method: str, sequence_id: int, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception as error:
            self._note(method, error)
            self._close(method, sequence_id)
            self._excluded.add(sequence_id)
            return None

    def _close(self, method: str, sequence_id: int) -> None:
        try:
            self._proposers[method].close([sequence_id])
        except Exception as error:
            self._note(method, error)

    def _note(self, method: str, error: Exception) -> None:
        self.num_failures += 1
        if self.num_failures.bit_count() == 1:  # 1, 2, 4, 8 …: a proposer may fail in every step
            logger.error("the proposer %s failed %d times", method, self.num_failures, exc_info=error)

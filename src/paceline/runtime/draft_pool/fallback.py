"""The fallback of the proposer `pool`: a local proposer for sequences that are open at no draft worker."""

from collections.abc import Iterable, Sequence

from paceline.runtime.draft_pool.drafts import DraftChain, as_chain
from paceline.speculation.proposer import Proposer, SequenceProgress


class FallbackDrafts:
    """Drafts chains without distributions. Without a proposer there are none."""

    def __init__(self, proposer: Proposer | None) -> None:
        self._proposer = proposer

    def observe(self, batch: Iterable[SequenceProgress]) -> None:
        """Report the progress of sequences that are open nowhere."""
        if self._proposer is not None:
            self._proposer.observe([as_chain(progress) for progress in batch])

    def collect(self, batch: Sequence[SequenceProgress], deadline: float) -> dict[int, DraftChain]:
        """Drafts by sequence id, for sequences that are open nowhere."""
        if self._proposer is None or not batch:
            return {}
        ids = [progress.sequence_id for progress in batch if progress.depth > 0]
        drafts = self._proposer.collect(ids, deadline).split()
        return {
            i: DraftChain(draft.tokens, ()) for i, draft in drafts.items() if draft.is_chain and draft.probs is None
        }

    def close(self, sequence_ids: Sequence[int]) -> None:
        if self._proposer is not None:
            self._proposer.close(sequence_ids)

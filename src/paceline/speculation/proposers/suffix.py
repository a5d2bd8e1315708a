"""Suffix lookup: what followed these tokens earlier in this text, and in what the same tenant was answered lately."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.speculation.drafts import DraftBatch
from paceline.speculation.proposer import Progress, ProposerTraits
from paceline.speculation.proposers.continuation import grow
from paceline.speculation.proposers.suffix_automaton import SuffixAutomaton
from paceline.speculation.proposers.traffic import MAX_TOKENS, RecentTraffic
from paceline.speculation.trees.guess import Guess, batch_of

CONTEXT = 16
"""Tokens to be looked up in recent traffic, and so many of a prompt are kept there before its output."""


@dataclass(slots=True)
class _Reader:
    progress: Progress
    text: SuffixAutomaton = field(default_factory=SuffixAutomaton)


class SuffixProposer:
    """Drafts a tree of the likeliest continuations, the larger the longer and more frequent the match.

    Outputs are remembered when their sequence closes, under its `cache_salt`: they never draft for another one. A sequence
    that never asked for a draft is neither indexed nor remembered.
    """

    traits = ProposerTraits()

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        """`max_tokens` of recent traffic are remembered, beside the running sequences' own text."""
        self._traffic = RecentTraffic(max_tokens)
        self._readers: dict[int, _Reader] = {}

    @property
    def num_remembered(self) -> int:
        """Tokens of closed sequences that are still known."""
        return self._traffic.num_tokens

    def observe(self, batch: Sequence[Progress]) -> None:
        for progress in batch:
            reader = self._readers.get(progress.sequence_id)
            if reader is None:
                self._readers[progress.sequence_id] = _Reader(progress)
            else:
                reader.progress = progress

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        readers = ((sequence_id, self._readers.get(sequence_id)) for sequence_id in sequence_ids)
        return batch_of((sequence_id, self._guess(reader)) for sequence_id, reader in readers if reader)

    def close(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            reader = self._readers.pop(sequence_id, None)
            if reader is not None and len(reader.text):
                self._remember(reader.progress)

    def _guess(self, reader: _Reader) -> Guess:
        progress = reader.progress
        if progress.depth == 0:
            return Guess()
        reader.text.extend(progress.ids[len(reader.text) :])
        best = grow(reader.text, reader.text.end, progress.depth)
        if progress.verification == "rejection" and not progress.sampling.is_greedy:
            # Another request with the same seed met the same noise: a draft made of its text is no longer independent of
            # the draws that accept it. A sequence's own past is: its noise was that of other positions.
            return best
        recent = progress.ids[-CONTEXT:]
        for index in self._traffic.indices(progress.cache_salt):
            other = grow(index, index.match(recent), progress.depth)
            if other.expected > best.expected:
                best = other
        return best

    def _remember(self, progress: Progress) -> None:
        if len(progress.ids) > progress.num_prompt:
            start = max(0, progress.num_prompt - CONTEXT)
            self._traffic.add(progress.cache_salt, progress.ids[start:])

"""Lookahead: n-grams that the target wrote while it corrected a window of guesses, with no model but the target itself.

A draft has two kinds of branches. *Candidates* are n-grams of the pool that begin with the newest token. The *window* is a
chain of guesses under Jacobi iteration; its rows are there to be corrected and are seldom accepted. Both are rows of the
verify pass, and the whole price is those rows: the window takes at most half of the depth that was granted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.speculation.drafts import DraftBatch
from paceline.speculation.proposer import Progress, ProposerTraits
from paceline.speculation.proposers.jacobi import JacobiWindow
from paceline.speculation.proposers.ngram_pool import NgramPool
from paceline.speculation.trees.guess import Guess, batch_of

SCATTER = 7919
"""A prime: strides over the text to where a window without guesses takes its tokens from."""


@dataclass(slots=True)
class _Looker:
    progress: Progress
    window: JacobiWindow
    pool: NgramPool = field(default_factory=NgramPool)
    num_pooled: int = 0
    """Committed tokens whose n-grams are in the pool."""
    draft: Guess = field(default_factory=Guess)
    base: int = 0
    """Tokens that were committed when `draft` was made."""
    chain: tuple[int, ...] = ()
    """Nodes of `draft` that are the window."""
    is_corrected: bool = False
    """The target's picks of a round have come: those of the next will."""


class LookaheadProposer:
    """Drafts candidates from a pool of the sequence's own n-grams, and, once `Progress.picks` bring the target's corrections,
    a window whose diagonals fill the pool. Until then a window would be rows for nothing, and there is none.

    Pools are per sequence: nothing one sequence wrote is ever drafted for another.
    """

    traits = ProposerTraits()

    def __init__(self, ngram: int = 4, window: int = 8) -> None:
        if ngram < 2 or window < 1:
            raise ValueError(f"need ngram >= 2 and window >= 1, got {ngram} and {window}")
        self._ngram, self._window = ngram, window
        self._lookers: dict[int, _Looker] = {}

    def observe(self, batch: Sequence[Progress]) -> None:
        for progress in batch:
            looker = self._lookers.get(progress.sequence_id)
            if looker is None:
                looker = self._lookers[progress.sequence_id] = _Looker(progress, JacobiWindow(self._ngram))
            looker.progress = progress
            if progress.picks:
                _correct(looker, progress.picks)

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        lookers = ((sequence_id, self._lookers.get(sequence_id)) for sequence_id in sequence_ids)
        return batch_of((sequence_id, self._guess(looker)) for sequence_id, looker in lookers if looker)

    def close(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self._lookers.pop(sequence_id, None)

    def _guess(self, looker: _Looker) -> Guess:
        ids, depth = looker.progress.ids, looker.progress.depth
        if depth == 0:
            looker.draft, looker.chain = Guess(), ()
            return looker.draft
        self._pool_committed(looker)
        window = self._fill(looker)[: depth // 2] if looker.is_corrected else []
        nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        for candidate in looker.pool.after(ids[-1]):
            _plant(nodes, candidate, depth - len(window))
        looker.chain = _plant(nodes, window, depth)
        looker.base = len(ids)
        looker.draft = Guess(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes))
        return looker.draft

    def _fill(self, looker: _Looker) -> list[int]:
        """The window: corrected guesses first, then what the pool knows, then tokens from anywhere in the text."""
        ids = looker.progress.ids
        tokens = looker.window.guesses(len(ids))[: self._window]
        while len(tokens) < self._window:
            known = looker.pool.after(tokens[-1] if tokens else ids[-1])
            tokens.append(known[0][0] if known else ids[(len(ids) + len(tokens)) * SCATTER % len(ids)])
        return tokens

    def _pool_committed(self, looker: _Looker) -> None:
        ids, size = looker.progress.ids, self._ngram
        for start in range(max(0, looker.num_pooled - size + 1), len(ids) - size + 1):
            looker.pool.add(ids[start : start + size])
        looker.num_pooled = len(ids)


def _correct(looker: _Looker, picks: Sequence[int]) -> None:
    """Move the window on by what the target picked after each of its guesses."""
    looker.is_corrected = True
    chain = [node for node in looker.chain if node + 1 < len(picks)]
    if chain:
        guesses = [looker.draft.tokens[node] for node in chain]
        for ngram in looker.window.advance(looker.base, guesses, [picks[node + 1] for node in chain]):
            looker.pool.add(ngram)
    looker.chain = ()


def _plant(nodes: dict[tuple[int, int], int], tokens: Sequence[int], budget: int) -> tuple[int, ...]:
    """Add a chain from the root, sharing what is there already, while `nodes` number less than `budget`; its nodes."""
    path: list[int] = []
    for token in tokens:
        edge = (path[-1] if path else -1, token)
        if edge not in nodes:
            if len(nodes) >= budget:
                break
            nodes[edge] = len(nodes)
        path.append(nodes[edge])
    return tuple(path)

"""Lookahead decoding drafts n-grams that the target picked while it corrected a window of guesses, with no model but the
target.

A draft has two kinds of branches. *Candidates* are pooled n-grams that begin with the newest token. The *window* is a chain of
guesses under Jacobi iteration; its rows are there to be corrected and are rarely accepted. Candidates and window are rows of
the verify pass and cost nothing else: the window takes at most half of the granted depth.

x_t[a] is the guess of round t for position a. The target's pick after x_t[a] becomes x_{t+1}[a + 1]. On a diagonal,
x_{t-n+1}[a-n+1], …, x_t[a], each token is the target's pick after the one before: an n-gram for the pool.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.speculation import ProposerTraits, SequenceProgress
from paceline.speculation.drafts import DraftBatch, DraftTree

MAX_KEYS = 4096
"""First tokens in a pool."""
PER_KEY = 8
"""N-grams of one first token."""
STRIDE = 7919
"""A prime: stride over the text to tokens that fill a window without guesses."""


class NgramPool:
    """At most `per_key` n-grams for each of at most `max_keys` first tokens; the least recently added ones are dropped."""

    def __init__(self, per_key: int = PER_KEY, max_keys: int = MAX_KEYS) -> None:
        if per_key < 1 or max_keys < 1:
            raise ValueError(f"need per_key >= 1 and max_keys >= 1, got {per_key} and {max_keys}")
        self._per_key, self._max_keys = per_key, max_keys
        self._ngrams: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = (
            OrderedDict()
        )  # first token -> the tokens after it

    def __len__(self) -> int:
        return sum(len(ngrams) for ngrams in self._ngrams.values())

    def add(self, ngram: Sequence[int]) -> None:
        first, others = ngram[0], tuple(ngram[1:])
        ngrams = self._ngrams.setdefault(first, OrderedDict())
        self._ngrams.move_to_end(first)
        ngrams[others] = None
        ngrams.move_to_end(others)
        if len(ngrams) > self._per_key:
            ngrams.popitem(last=False)
        if len(self._ngrams) > self._max_keys:
            self._ngrams.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Continuations of `token`, the latest first."""
        return list(reversed(self._ngrams.get(token, {})))


class JacobiWindow:
    """The guesses of one sequence by absolute position, with those of the last rounds for the diagonals."""

    def __init__(self, ngram: int) -> None:
        if ngram < 2:
            raise ValueError(f"an n-gram has at least 2 tokens, got {ngram}")
        self._rounds: deque[Mapping[int, int]] = deque(maxlen=ngram)  # x_t by position, the newest last

    def advance(self, start: int, guesses: Sequence[int], picks: Sequence[int]) -> list[tuple[int, ...]]:
        """`guesses` were at `start` and after; the target picked `picks[i]` after `guesses[i]`. Returns new n-grams."""
        drafted = {start + i: token for i, token in enumerate(guesses)}
        # The drafted window is the newest round: the last picks, and the tokens that filled it up
        if self._rounds:
            self._rounds[-1] = drafted
        else:
            self._rounds.append(drafted)
        self._rounds.append({start + i + 1: token for i, token in enumerate(picks)})
        return self._diagonals()

    def guesses(self, start: int) -> list[int]:
        """Guesses for `start` and the positions after it, up to the first gap."""
        newest = self._rounds[-1] if self._rounds else {}
        tokens: list[int] = []
        while (token := newest.get(start + len(tokens))) is not None:
            tokens.append(token)
        return tokens

    def _diagonals(self) -> list[tuple[int, ...]]:
        if len(self._rounds) < (self._rounds.maxlen or 0):
            return []
        found = []
        for end in self._rounds[-1]:
            tokens = [
                round_.get(end - back)
                for back, round_ in zip(range(len(self._rounds) - 1, -1, -1), self._rounds, strict=True)
            ]
            ngram = tuple(token for token in tokens if token is not None)
            if len(ngram) == len(tokens):
                found.append(ngram)
        return found


@dataclass(slots=True)
class _Sequence:
    progress: SequenceProgress
    window: JacobiWindow
    pool: NgramPool = field(default_factory=NgramPool)
    num_pooled: int = 0
    """Committed tokens whose n-grams are in the pool."""
    draft: DraftTree = field(default_factory=DraftTree)
    base: int = 0
    """Committed tokens when `draft` was made."""
    chain: tuple[int, ...] = ()
    """Nodes of `draft` that are the window."""
    is_corrected: bool = False
    """Whether the target's picks of a round have come, so that those of later rounds will."""


class LookaheadProposer:
    """Drafts candidates from the n-grams of the sequence itself. Once `SequenceProgress.picks` has the target's corrections, it
    also drafts a window whose diagonals fill the pool. Without corrections a window would be useless rows.

    Every sequence has its own pool: no text of one sequence is drafted for another.
    """

    traits = ProposerTraits()

    def __init__(self, ngram: int = 4, window: int = 8) -> None:
        if ngram < 2 or window < 1:
            raise ValueError(f"need ngram >= 2 and window >= 1, got {ngram} and {window}")
        self._ngram, self._window = ngram, window
        self._sequences: dict[int, _Sequence] = {}

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        for progress in batch:
            sequence = self._sequences.get(progress.sequence_id)
            if sequence is None:
                sequence = self._sequences[progress.sequence_id] = _Sequence(progress, JacobiWindow(self._ngram))
            sequence.progress = progress
            if progress.picks:
                _correct(sequence, progress.picks)

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        found = ((sequence_id, self._sequences.get(sequence_id)) for sequence_id in sequence_ids)
        return DraftBatch.trees((sequence_id, self._draft(sequence)) for sequence_id, sequence in found if sequence)

    def close(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self._sequences.pop(sequence_id, None)

    def _draft(self, sequence: _Sequence) -> DraftTree:
        ids, depth = sequence.progress.ids, sequence.progress.depth
        if depth == 0:
            sequence.draft, sequence.chain = DraftTree(), ()
            return sequence.draft
        self._pool_committed(sequence)
        window = self._fill(sequence)[: depth // 2] if sequence.is_corrected else []
        nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        for candidate in sequence.pool.after(ids[-1]):
            _add_chain(nodes, candidate, depth - len(window))
        sequence.chain = _add_chain(nodes, window, depth)
        sequence.base = len(ids)
        sequence.draft = DraftTree(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes))
        return sequence.draft

    def _fill(self, sequence: _Sequence) -> list[int]:
        """The window: corrected guesses first, then continuations of the pool, then tokens from anywhere in the text."""
        ids = sequence.progress.ids
        tokens = sequence.window.guesses(len(ids))[: self._window]
        while len(tokens) < self._window:
            known = sequence.pool.after(tokens[-1] if tokens else ids[-1])
            tokens.append(known[0][0] if known else ids[(len(ids) + len(tokens)) * STRIDE % len(ids)])
        return tokens

    def _pool_committed(self, sequence: _Sequence) -> None:
        ids, size = sequence.progress.ids, self._ngram
        for start in range(max(0, sequence.num_pooled - size + 1), len(ids) - size + 1):
            sequence.pool.add(ids[start : start + size])
        sequence.num_pooled = len(ids)


def _correct(sequence: _Sequence, picks: Sequence[int]) -> None:
    """Advance the window by the target's picks after its guesses."""
    sequence.is_corrected = True
    chain = [node for node in sequence.chain if node + 1 < len(picks)]
    if chain:
        guesses = [sequence.draft.tokens[node] for node in chain]
        for ngram in sequence.window.advance(sequence.base, guesses, [picks[node + 1] for node in chain]):
            sequence.pool.add(ngram)
    sequence.chain = ()


def _add_chain(nodes: dict[tuple[int, int], int], tokens: Sequence[int], budget: int) -> tuple[int, ...]:
    """Add a chain from the root while there are fewer than `budget` nodes, sharing existing nodes. Returns its nodes."""
    path: list[int] = []
    for token in tokens:
        edge = (path[-1] if path else -1, token)
        if edge not in nodes:
            if len(nodes) >= budget:
                break
            nodes[edge] = len(nodes)
        path.append(nodes[edge])
    return tuple(path)

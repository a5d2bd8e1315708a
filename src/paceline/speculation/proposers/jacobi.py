"""Jacobi iteration: a window of guesses that the target corrects all at once, round after round.

x_t[a] is the guess of round t for position a. The target's pick after x_t[a] becomes x_{t+1}[a + 1]. Tokens along a
diagonal, x_{t-n+1}[a-n+1], …, x_t[a], each followed the one before by the target's own word: n-grams for the pool.
"""

from collections import deque
from collections.abc import Mapping, Sequence


class JacobiWindow:
    """The guesses of one sequence by absolute position, and those of the last rounds for their diagonals."""

    def __init__(self, ngram: int) -> None:
        if ngram < 2:
            raise ValueError(f"an n-gram has at least 2 tokens, got {ngram}")
        self._rounds: deque[Mapping[int, int]] = deque(maxlen=ngram)  # x_t by position, the newest last

    def advance(self, start: int, guesses: Sequence[int], picks: Sequence[int]) -> list[tuple[int, ...]]:
        """`guesses` stood at `start` and after; the target picked `picks[i]` after `guesses[i]`. Returns new n-grams."""
        shown = {start + i: token for i, token in enumerate(guesses)}
        # what was shown is the newest round: the last one's picks, and whatever filled up the window
        if self._rounds:
            self._rounds[-1] = shown
        else:
            self._rounds.append(shown)
        self._rounds.append({start + i + 1: token for i, token in enumerate(picks)})
        return self._diagonals()

    def guesses(self, start: int) -> list[int]:
        """What is guessed for `start` and the positions after it, as far as the guesses go without a gap."""
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

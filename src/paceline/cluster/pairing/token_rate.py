"""Tokens per second of a target's sequences, as its draft worker sees them: what a pass of the draft has to earn. Pure.

While a target waits, one more pass takes t seconds and adds a token that is accepted with probability S, the product of the
acceptance of all tokens up to it. A sequence that makes r tokens per second makes r t tokens in that time. The pass pays if

    S  >=  r t
"""

WINDOW = 32.0
"""Rounds in the decaying sums."""
MIN_ROUNDS = 8.0
"""Rounds in the sums before they say anything."""


class TargetTokenRate:
    """The rate of one target, per sequence."""

    __slots__ = ("_last", "_rounds", "_seconds", "_tokens")

    def __init__(self) -> None:
        self._rounds = self._tokens = self._seconds = 0.0
        self._last: float | None = None

    def observe(self, tokens: float, now: float) -> None:
        """Count a request for drafts. `tokens` is the mean over its sequences of the tokens committed since the last
        request."""
        last, self._last = self._last, now
        if last is None or tokens <= 0.0:
            return
        keep = 1.0 - 1.0 / WINDOW
        self._rounds = self._rounds * keep + 1.0
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + now - last

    def is_worth_waiting(self, survival: float, seconds: float) -> bool:
        """Whether a target should wait `seconds` for a token that is accepted with probability `survival`. It should while
        its rate is not known."""
        if self._rounds < MIN_ROUNDS or self._seconds <= 0.0:
            return True
        return survival >= self._tokens / self._seconds * seconds

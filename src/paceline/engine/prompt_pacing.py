"""How many prompt tokens a step may compute while other sequences decode, so that their next tokens do not wait long."""

STEP_SECONDS = 0.2
"""Time of prompt tokens in one step beside sequences that decode."""
MIN_TOKENS = 32
"""Fewest prompt tokens of a step, and fewest scheduled tokens of a step that is measured."""
WEIGHT = 0.25
"""Weight of the newest measurement."""


class PromptPacer:
    """Measures the time of a scheduled token in steps with many of them. It matters on a CPU: a GPU computes thousands in that
    time."""

    def __init__(self, seconds: float = STEP_SECONDS) -> None:
        self._seconds = seconds
        self._per_token: float | None = None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step computed `num_tokens` scheduled tokens in this time."""
        if num_tokens < MIN_TOKENS:
            return
        measured, last = seconds / num_tokens, self._per_token
        self._per_token = measured if last is None else (1.0 - WEIGHT) * last + WEIGHT * measured

    @property
    def max_tokens(self) -> int | None:
        """Most prompt tokens of a step beside sequences that decode; None: not known yet."""
        if not self._per_token:
            return None
        return max(MIN_TOKENS, int(self._seconds / self._per_token))

"""How many tokens a text is likely to have left. vLLM does not pass the limit of a request to the plugin."""

from collections import deque

KEPT = 128
"""Ended texts that are remembered."""
FEW = 8
"""Ended texts below which nothing is expected."""


class OutputLengths:
    """Learns from the texts that have ended."""

    def __init__(self) -> None:
        self._ended: deque[int] = deque(maxlen=KEPT)

    def add(self, length: int) -> None:
        """A text has ended after `length` tokens."""
        self._ended.append(length)

    def remaining(self, generated: int) -> int | None:
        """Tokens that a text with `generated` tokens is expected to have left, which is the mean over the longer texts. 1 if no
        text was longer. None if few texts have ended."""
        if len(self._ended) < FEW:
            return None
        longer = [length - generated for length in self._ended if length > generated]
        return max(1, round(sum(longer) / len(longer))) if longer else 1

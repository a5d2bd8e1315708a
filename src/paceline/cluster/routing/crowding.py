"""What is lost when a new prompt takes the place of what a worker has cached."""

import math

HALF_LIFE = 300.0
"""Seconds in which half of the prompts that a worker computed are taken to be no longer in use."""
STALE = 0.25
"""Share of whatever else is in its cache that is taken to be in use."""


class Crowding:
    """Of one worker. Prompts it computed lately are likely to be asked for again; of the rest of its cache less is known, and
    nothing is lost where there is room."""

    __slots__ = ("_since", "_tokens")

    def __init__(self) -> None:
        self._tokens = 0.0
        self._since = 0.0

    def add(self, tokens: int, now: float) -> None:
        """So many are computed there, and kept."""
        self._tokens, self._since = self._recent(now) + tokens, now

    def share(self, held: int, room: int, now: float) -> float:
        """Of its cache, which has `room` tokens and holds `held`: what is in use, 0 to 1. Of a cache whose size is not known
        (0), 0."""
        return min(1.0, (self._recent(now) + STALE * held) / room) if room else 0.0

    def _recent(self, now: float) -> float:
        return self._tokens * math.exp2((self._since - now) / HALF_LIFE)

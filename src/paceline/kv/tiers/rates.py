"""Is it quicker to bring a block or to compute it again? Pure: measurements in, a decision out."""

from typing import Literal

Source = Literal["disk", "peer"]
MEMORY = 0.9
"""Weight that what is known keeps when something new is measured."""
LEAST_ROWS = 64
"""Of a pass: one of fewer rows says nothing about prompts."""
MARGIN = 0.9
"""Bringing must take no more than this share of the time that computing would: it does not always work."""
RETRY = 32
"""Now and then it is tried all the same: a disk that was busy once is not slow for ever."""


class Rate:
    """Seconds per token, old measurements fading."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._seconds = MEMORY * self._seconds + seconds
        self._tokens = MEMORY * self._tokens + tokens

    @property
    def value(self) -> float | None:
        """None before the first measurement."""
        return self._seconds / self._tokens if self._tokens else None


class LoadRates:
    """What the engine takes to compute a token of a prompt, and what each source takes to bring its part of the cache."""

    def __init__(self) -> None:
        self._prefill = Rate()
        self._sources: dict[Source, Rate] = {"disk": Rate(), "peer": Rate()}
        self._declined: dict[Source, int] = {"disk": 0, "peer": 0}

    def computed(self, rows: int, seconds: float) -> None:
        """A pass over so many rows took so long."""
        if rows >= LEAST_ROWS:
            self._prefill.add(rows, seconds)

    def brought(self, source: Source, tokens: int, seconds: float) -> None:
        self._sources[source].add(tokens, seconds)

    def seconds_to_compute(self, tokens: int) -> float | None:
        """None before the first measurement."""
        value = self._prefill.value
        return None if value is None else value * tokens

    def is_worth(self, source: Source) -> bool:
        """Whether tokens should be brought from there. As long as nothing is known: yes."""
        computing, bringing = self._prefill.value, self._sources[source].value
        if computing is None or bringing is None or bringing <= MARGIN * computing:
            return True
        self._declined[source] += 1
        return self._declined[source] % RETRY == 0

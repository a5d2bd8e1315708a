"""Decides whether loading a block is faster than computing it again. Pure: measurements in, a decision out."""

from typing import Literal

Source = Literal["disk", "peer"]
MEMORY = 0.9
"""Weight of earlier measurements when a new one is added."""
LEAST_ROWS = 64
"""Fewest rows of a pass that is measured: smaller passes are not typical of prefill."""
MARGIN = 0.9
"""Largest share of the compute time that loading may take, because loading can fail."""
RETRY = 32
"""One in this many declined loads is tried anyway, to measure a source that may be fast again."""


class Rate:
    """Seconds per token, with exponentially fading measurements."""

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
    """Seconds per token: of prefill, and of loading from each source."""

    def __init__(self) -> None:
        self._prefill = Rate()
        self._sources: dict[Source, Rate] = {"disk": Rate(), "peer": Rate()}
        self._declined: dict[Source, int] = {"disk": 0, "peer": 0}

    def observe_compute(self, rows: int, seconds: float) -> None:
        """Add the time of a pass."""
        if rows >= LEAST_ROWS:
            self._prefill.add(rows, seconds)

    def observe_load(self, source: Source, tokens: int, seconds: float) -> None:
        self._sources[source].add(tokens, seconds)

    def seconds_to_compute(self, tokens: int) -> float | None:
        """None before the first measurement."""
        value = self._prefill.value
        return None if value is None else value * tokens

    def pays(self, source: Source) -> bool:
        """Whether to load from this source. True before the first measurement."""
        computing, bringing = self._prefill.value, self._sources[source].value
        if computing is None or bringing is None or bringing <= MARGIN * computing:
            return True
        self._declined[source] += 1
        return self._declined[source] % RETRY == 0

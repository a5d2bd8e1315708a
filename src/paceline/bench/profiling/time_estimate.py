"""How long the measurement of a profile takes. It is estimated from the times of two passes and corrected while it runs. The
module is pure."""

from collections.abc import Sequence
from dataclasses import dataclass

PRIOR = 0.1
"""Weight of the first estimate against the time that parts took, as a share of the whole."""


@dataclass(frozen=True, slots=True)
class ProfilePassTimes:
    """Times of passes by rows: a line through two measured passes."""

    single: float
    """Seconds of a pass with one row."""
    most: float
    """Seconds of a pass with `rows` rows."""
    rows: int

    def at(self, rows: float) -> float:
        return self.single + max(0.0, self.most - self.single) * (rows - 1) / max(1, self.rows - 1)


@dataclass(frozen=True, slots=True)
class Part:
    """One measurement of a profile."""

    name: str
    seconds: float
    """Time that it should take."""


@dataclass(frozen=True, slots=True)
class MeasurementProgress:
    part: str
    """The measurement that begins."""
    done: float
    """Share of the whole, 0 to 1."""
    seconds_left: float
    """Estimate for all measurements that have not ended."""


class TimeEstimate:
    """The time left. Parts begin, or are left out, in their order."""

    def __init__(self, parts: Sequence[Part], now: float) -> None:
        self._parts, self._began = {part.name: part.seconds for part in parts}, now
        self._total = sum(self._parts.values())
        self._measured: list[str] = []

    def begin(self, name: str, now: float) -> MeasurementProgress:
        """A part begins now."""
        progress = self._progress(name, name, now)
        self._measured.append(name)
        return progress

    def leave_out(self, name: str, now: float) -> MeasurementProgress:
        """A part is not measured."""
        self._parts[name] = 0.0
        return self._progress(name, f"{name}: left out, the time is over", now)

    def _progress(self, name: str, text: str, now: float) -> MeasurementProgress:
        measured, names = sum(self._parts[part] for part in self._measured), list(self._parts)
        left = sum(self._parts[part] for part in names[names.index(name) :])
        prior = PRIOR * self._total
        factor = (now - self._began + prior) / (measured + prior) if prior else 1.0
        return MeasurementProgress(text, 1.0 - left / self._total if self._total else 0.0, factor * left)


def sequences(count: int) -> str:
    return f"{count} sequence{'s' * (count != 1)}"

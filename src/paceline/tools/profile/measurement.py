"""Shares of a round's time by part, the distance to the bandwidth floor, and how long the measurement of a profile takes.

`TimeEstimate` estimates the duration from the times of two passes, and corrects it while the measurement runs. It is pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

PARTS = ("draft", "verify", "sample", "gap")
LABELS = {"draft": "draft", "verify": "verify", "sample": "sample", "gap": "CPU gap"}


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Seconds of one round, by the clock or by GPU events."""

    draft: float
    """Drafting."""
    verify: float
    """The target's forward pass."""
    sample: float
    """From logits to verdicts."""
    gap: float
    """All other time, which is that of scheduling, commit and text, and the time between steps."""
    total: float
    bytes_read: int
    """Bytes of weights and KV cache that the passes read."""


@dataclass(frozen=True, slots=True)
class Share:
    """One part of the time."""

    part: str
    seconds: float
    fraction: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Means over the rounds, so that the parts add up to the total."""

    name: str
    num_rounds: int
    parts: tuple[Share, ...]
    seconds: float
    median_seconds: float
    bytes_read: float
    bandwidth: float
    """Bytes per second of a large copy on this device."""

    @property
    def floor_seconds(self) -> float:
        """The time to read the bytes once. No round is faster."""
        return self.bytes_read / self.bandwidth

    @property
    def floor_fraction(self) -> float:
        """Floor over time. 1.0 is the limit of the memory."""
        return self.floor_seconds / self.seconds

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "rounds": self.num_rounds,
            "seconds": {"mean": self.seconds, "p50": self.median_seconds},
            "parts": {share.part: {"seconds": share.seconds, "share": share.fraction} for share in self.parts},
            "bytes_read": self.bytes_read,
            "bandwidth": self.bandwidth,
            "floor_seconds": self.floor_seconds,
            "floor_fraction": self.floor_fraction,
        }


def profile(name: str, rounds: Sequence[RoundTimes], bandwidth: float) -> Profile | None:
    """The profile of the mean round. None without rounds."""
    if not rounds:
        return None
    total = fmean(round_.total for round_ in rounds)
    means = {part: fmean(getattr(round_, part) for round_ in rounds) for part in PARTS}
    return Profile(
        name=name,
        num_rounds=len(rounds),
        parts=tuple(Share(part, seconds, seconds / total) for part, seconds in means.items()),
        seconds=total,
        median_seconds=median(round_.total for round_ in rounds),
        bytes_read=fmean(round_.bytes_read for round_ in rounds),
        bandwidth=bandwidth,
    )


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

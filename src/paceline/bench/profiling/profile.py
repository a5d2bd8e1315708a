"""Shares of a round's time by part, and the distance to the bandwidth floor."""

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

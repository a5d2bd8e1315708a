"""The offline gate: whether a candidate is better than the current draft on held-out samples. It is pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OfflineLimits:
    margin: float = 0.01
    """Least gain in tokens per round, 0.01 for 1% more."""
    min_samples: int = 16
    errors: float = 1.645
    """Standard errors by which the gain must be above zero. 1.645 is 95% on one side."""


@dataclass(frozen=True, slots=True)
class OfflineDecision:
    is_better: bool
    gain: float | None
    """Relative gain in tokens per round. None if there are not enough samples."""
    reason: str


def decide_offline(
    current: Sequence[int], candidate: Sequence[int], limits: OfflineLimits | None = None
) -> OfflineDecision:
    """`current` and `candidate` are the rounds that each draft needs for the same held-out samples. Fewer rounds are better.

    The gain is the logarithm of the ratio of the two sums. Its error is that of paired samples, by the delta method.
    """
    limits = limits or OfflineLimits()
    pairs = [(old, new) for old, new in zip(current, candidate, strict=True) if old and new]
    count = len(pairs)
    if count < limits.min_samples:
        return OfflineDecision(False, None, f"{count} held-out samples, and {limits.min_samples} are needed")
    before, after = sum(old for old, _ in pairs), sum(new for _, new in pairs)
    gain = math.log(before / after)
    variance = count / (count - 1) * sum((old / before - new / after) ** 2 for old, new in pairs)
    error = math.sqrt(variance)
    relative = math.expm1(gain)
    text = f"{relative:+.1%} tokens per round on {count} held-out samples (standard error {error:.1%})"
    if gain - limits.errors * error <= 0.0:
        return OfflineDecision(False, relative, f"{text}: not certain to be better")
    if relative < limits.margin:
        return OfflineDecision(False, relative, f"{text}: less than the margin of {limits.margin:.1%}")
    return OfflineDecision(True, relative, text)

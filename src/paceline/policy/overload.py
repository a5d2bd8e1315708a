"""What a process refuses while its memory is almost full, in stages as Envoy's overload manager has them.

With every stage the process refuses more. A stage begins with the first reading that reaches its share of the limit, and ends
when less was used for a while. An `Allowance` limits what a client may use of anything. The caller passes readings and times.
"""

from dataclasses import dataclass
from enum import IntEnum


class OverloadStage(IntEnum):
    """What a process refuses. Each stage includes those before it."""

    NORMAL = 0
    LARGE_BODIES = 1
    """It refuses large bodies, and gives freed memory back to the system."""
    NEW_REQUESTS = 2
    DROP = 3
    """It also ends the most expensive request, again and again."""

    @property
    def words(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class OverloadRules:
    """When the stages begin and end. Shares are of the limit."""

    starts: tuple[float, float, float] = (0.80, 0.90, 0.95)
    """Share from which each stage holds."""
    gap: float = 0.05
    """A stage ends this much below the share where it starts."""
    calm_seconds: float = 2.0
    """Time below that share after which a stage ends, one after the other."""
    drop_seconds: float = 1.0
    """Time between two requests that are ended."""


@dataclass(frozen=True, slots=True)
class OverloadDecision:
    """What one reading leads to."""

    stage: OverloadStage
    has_changed: bool
    drops: bool
    """Whether to end the most expensive request now."""


class OverloadPolicy:
    """The stage of one process. Times are seconds on the caller's clock."""

    def __init__(self, limit: int, rules: OverloadRules | None = None) -> None:
        """`limit` is in bytes."""
        self.limit, self._rules = limit, rules or OverloadRules()
        self.stage = OverloadStage.NORMAL
        self._calm_since: float | None = None
        """Time since which less is used than the stage needs to hold."""
        self._next_drop = 0.0

    def observe(self, used: int, now: float) -> OverloadDecision:
        """The stage after a reading of `used` bytes."""
        before, share, rules = self.stage, used / self.limit, self._rules
        reached = OverloadStage(sum(share >= start for start in rules.starts))
        if reached >= before:
            self.stage, self._calm_since = reached, None
        elif share > rules.starts[before - 1] - rules.gap:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        elif now - self._calm_since >= rules.calm_seconds:
            self.stage, self._calm_since = OverloadStage(before - 1), now
        drops = reached is OverloadStage.DROP and now >= self._next_drop
        if drops:
            self._next_drop = now + rules.drop_seconds
        return OverloadDecision(self.stage, self.stage is not before, drops)


class Allowance:
    """A token bucket."""

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self._level, self._updated = float(per_minute), now

    def wait_seconds(self, amount: float, now: float) -> float:
        """Seconds until `amount` is available; 0 if it is now."""
        self._refill(now)
        return max(0.0, (amount - self._level) * 60.0 / self.per_minute)

    def take(self, amount: float, now: float) -> None:
        self._refill(now)
        self._level -= amount

    def _refill(self, now: float) -> None:
        self._level = min(self.per_minute, self._level + (now - self._updated) * self.per_minute / 60.0)
        self._updated = now

"""How long to train and how fast to learn: by a number of steps, by the clock, or by whichever ends first."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """A short warm-up, then a cosine down to zero at the end."""

    learning_rate: float = 1e-3
    steps: int | None = None
    seconds: float | None = None
    warmup: int = 100

    def done(self, step: int, seconds: float) -> float:
        """The share of the training that lies behind, 1 at the end."""
        by_steps = step / self.steps if self.steps else 0.0
        by_clock = seconds / self.seconds if self.seconds else 0.0
        return min(1.0, max(by_steps, by_clock))

    def rate(self, step: int, seconds: float) -> float:
        warm = min(1.0, (step + 1) / self.warmup)
        return self.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * self.done(step, seconds)))

"""Objectives of a service: the latencies that a request must meet."""

import math
from dataclasses import dataclass

from paceline.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Objective:
    """Limits in seconds. An infinite value is no limit. A request meets the objective if it meets `ttft` and `tpot`."""

    ttft: float = math.inf
    """Time to first token."""
    tpot: float = math.inf
    """Mean time per token after the first."""
    share: float = 0.99
    """Share of the requests that must meet them."""

    def __post_init__(self) -> None:
        if not (self.ttft > 0.0 and self.tpot > 0.0 and 0.0 < self.share <= 1.0):
            raise InvalidRequest(
                f"an objective needs times above 0 and a share in (0, 1], got {self}", field="objective"
            )

    def is_met(self, ttft: float, tpot: float) -> bool:
        return ttft <= self.ttft and tpot <= self.tpot

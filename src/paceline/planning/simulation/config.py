"""The cluster to simulate."""

from dataclasses import dataclass
from typing import Literal

from paceline.core.cluster_config import RouterPolicy
from paceline.core.errors import InvalidConfig
from paceline.planning.profiles.profile import WorkerProfile

Mode = Literal["closed_form", "stepwise"]
DepthRule = Literal["expected", "policy"]


@dataclass(frozen=True, slots=True)
class Speculation:
    """How target workers draft."""

    alphas: tuple[float, ...]
    """Conditional acceptance by position; the last one applies to all later positions."""
    max_depth: int = 8
    rule: DepthRule = "expected"
    """`expected`: the depth with the most expected tokens per second. `policy`: the production policy `goodput`."""

    def __post_init__(self) -> None:
        if not self.alphas or not all(0.0 <= alpha <= 1.0 for alpha in self.alphas):
            raise InvalidConfig(f"alpha must be in [0, 1], got {self.alphas}")
        if self.max_depth < 1:
            raise InvalidConfig(f"the largest depth must be at least 1, got {self.max_depth}")


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    profile: WorkerProfile
    workers: int = 1
    """Target workers."""
    draft_workers: int = 0
    """Draft workers that the targets share evenly; 0: each target drafts on its own device."""
    speculation: Speculation | None = None
    """None: plain decoding."""
    router: RouterPolicy = "kv_aware"
    mode: Mode = "closed_form"
    """`closed_form`: steps between two events are one event. `stepwise`: every step is an event with sampled acceptance."""
    streams: int | None = None
    """Requests in flight: each end starts the next request. None: requests arrive at their times."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.workers < 1 or self.draft_workers < 0:
            raise InvalidConfig(
                f"a simulation needs a target worker, got {self.workers} and {self.draft_workers} draft workers"
            )
        if self.draft_workers and self.speculation is None:
            raise InvalidConfig("draft workers need an alpha: give --alpha, or no draft workers")
        if self.speculation is not None and self.speculation.rule == "policy" and self.mode == "closed_form":
            raise InvalidConfig("the production policy decides in every step: use the stepwise mode")
        if self.streams is not None and self.streams < 1:
            raise InvalidConfig(f"streams must be at least 1, got {self.streams}")

    @property
    def price_per_hour(self) -> float:
        """Dollars of all workers."""
        targets = self.workers * self.profile.price_per_hour.value
        return targets + self.draft_workers * self.profile.draft_price_per_hour.value

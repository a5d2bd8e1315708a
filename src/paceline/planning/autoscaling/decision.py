"""Settings of the planner, and its decisions with their reasons."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.core.errors import InvalidRequest
from paceline.core.pool_config import Role
from paceline.planning.profiles.profile import WorkerProfile
from paceline.planning.simulation.config import Speculation
from paceline.planning.simulation.objective import Objective
from paceline.planning.sizing.candidate import ClusterLimits

HOLD_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    profile: WorkerProfile
    objective: Objective
    limits: ClusterLimits = field(default_factory=ClusterLimits)
    speculation: Speculation | None = None
    interval: float = 10.0
    """Seconds between observations."""
    fewest: int = 1
    """Target workers that always serve."""
    period: float | None = None
    """Seconds of a season, such as a day. None if no season is known."""
    hold: float = HOLD_SECONDS
    """Seconds of past load that a pool must be able to carry, with its bursts, before it shrinks."""

    def __post_init__(self) -> None:
        if not (self.interval > 0.0 and math.isfinite(self.interval)) or self.fewest < 1:
            raise InvalidRequest("a planner needs an interval above 0 and at least 1 worker", field="planner")
        if self.dollars(self.fewest) > self.limits.dollars_per_hour or self.fewest > self.limits.workers:
            raise InvalidRequest(f"{self.fewest} target workers are over the limits: raise them", field="limits")

    def dollars(self, targets: int, prefills: int = 0, drafts: int = 0) -> float:
        """Dollars per hour."""
        price = self.profile.price_per_hour.value
        return (targets + prefills) * price + drafts * self.profile.draft_price_per_hour.value


@dataclass(frozen=True, slots=True)
class Rates:
    """Requests per second that a decision is based on."""

    load: float = 0.0
    """The rate in the last interval."""
    forecast: float = 0.0
    """The rate that is expected when a worker that starts now is ready."""
    capacity: float = 0.0
    """The rate of one target worker within the objective. 0 if it is not known."""


@dataclass(frozen=True, slots=True)
class Need:
    """Target workers that the load needs, before the limits, and why."""

    targets: int
    cause: str
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Sizes, and why."""

    time: float
    sizes: Mapping[Role, int]
    before: Mapping[Role, int]
    cause: str
    """`forecast`, `queue`, `idle`, `steady`, `limits` or `invalid`."""
    reason: str
    load: float
    """Requests per second of the last interval."""
    forecast: float
    """Requests per second that are expected when a worker that starts now is ready."""
    capacity: float
    """Requests per second of one target worker within the objective. 0 if it is not known."""
    dollars_per_hour: float
    is_enough: bool
    """Whether the sizes cover the load; if not, the limits forbid more."""

    @property
    def changes(self) -> bool:
        return any(self.sizes.get(role) != size for role, size in self.before.items())

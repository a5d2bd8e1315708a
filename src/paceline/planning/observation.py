"""What a planner sees of a cluster, and the sizes of pools that it decides."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.pool_config import Role

ROLES: tuple[Role, ...] = ("target", "prefill", "draft")


@dataclass(frozen=True, slots=True)
class PoolState:
    """Workers of one role."""

    ready: int = 0
    starting: int = 0
    draining: int = 0

    @property
    def ready_or_starting(self) -> int:
        """Workers that serve now or will."""
        return self.ready + self.starting


@dataclass(frozen=True, slots=True)
class Observation:
    """The cluster at `time`, and what happened in the `seconds` before."""

    time: float
    seconds: float
    arrivals: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of the arrivals."""
    cached_tokens: int = 0
    """Prompt tokens found in a cache, of requests that got their first token."""
    started: int = 0
    """Requests that got their first token."""
    started_tokens: int = 0
    """Their prompt tokens."""
    finished: int = 0
    output_tokens: int = 0
    """Tokens of the finished requests."""
    missed: int = 0
    """Finished requests that missed the objective."""
    waiting: int = 0
    """Requests without a first token, now."""
    running: int = 0
    """Unfinished requests, now."""
    kv_use: float = 0.0
    """Used share of the KV caches of ready target workers, now."""
    busy: float = 0.0
    """Share of the time in which ready target workers ran steps."""
    pools: Mapping[Role, PoolState] = field(default_factory=dict)

    def pool(self, role: Role) -> PoolState:
        return self.pools.get(role, PoolState())


Sizes = Mapping[Role, int]
"""Workers by role; a role that is absent keeps its size."""


class Controller(Protocol):
    """Decides sizes of pools from observations, at an interval."""

    @property
    def interval(self) -> float:
        """Seconds between two observations."""
        ...

    def decide(self, observation: Observation) -> Sizes: ...

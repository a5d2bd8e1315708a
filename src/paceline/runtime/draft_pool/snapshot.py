"""What a pool proposer says about the draft workers it uses."""

from dataclasses import dataclass

from paceline.cluster.cost.symptoms import Symptom
from paceline.runtime.draft_pool.connection import LinkCounts, State


@dataclass(frozen=True, slots=True)
class LinkSnapshot:
    name: str
    address: str
    state: State
    epoch: int
    round_trip: float | None
    """Seconds; None before an answer was waited for."""
    queue: float
    sequences: int
    counts: LinkCounts
    pass_seconds: float = 0.0
    """Of one pass over its model, of late; 0: not known."""
    resting: float | None = None
    """It has stopped drafting ahead for this target: the share of drafts that were ready. None: it drafts ahead."""


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """What the proposer says about the pool it uses."""

    links: tuple[LinkSnapshot, ...]
    symptoms: tuple[Symptom, ...]
    waited_steps: int
    steps: int
    wait_seconds: float
    undrafted: int
    """Rounds that got no draft in time."""

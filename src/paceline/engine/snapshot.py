"""What an engine is doing, for whoever watches it."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.flags import SpeculationFlags
from paceline.speculation.breaker import BreakerState


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """One class of traffic: a method and a category."""

    method: str
    category: str
    breaker: BreakerState
    alphas: tuple[float, ...]
    """Conditional acceptance by position over recent rounds, as far as drafts were tested."""
    mean_depth: float
    """Of recent decisions, those for 0 included."""
    fallbacks: Mapping[str, int]
    """Sequence-steps decoded plainly although speculation was on, by reason; see `engine/tally.py`."""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    running: int
    """Sequences with a seat."""
    waiting: int
    kv_used: int
    """Blocks held by sequences; what only the prefix cache remembers is free."""
    kv_total: int
    preemptions: int
    invalid_drafts: int
    flags: SpeculationFlags
    """As in effect: no field is None."""
    traffic: tuple[TrafficReport, ...]

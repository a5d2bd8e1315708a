"""A request that a router has sent to a worker, and what its first token says about the rates."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cluster.routing.peer_hints import LEAST_GAIN
from paceline.cluster.routing.worker_rates import LEAST_TOKENS, WorkerRates
from paceline.core.kv_events import TIERS


@dataclass(slots=True)
class Placed:
    worker: str
    count: int
    """Tokens of its prompt."""
    have: int
    """Of them, those that should be cached there, or on their way."""
    missing: int
    """Of the others, those that another worker could give it."""
    shares: Sequence[int]
    """Of `have`, by tier, if some are not on the device."""
    since: float
    has_started: bool = False


def measure(rates: WorkerRates, placed: Placed, cached: int, seconds: float, now: float) -> None:
    """It had its first token `seconds` after its turn had come, `cached` tokens of its prompt being there.

    What was loaded or fetched took what is left beyond computing. Where less was there than expected, or it came from several
    places, that says nothing.
    """
    computed, more = max(0, placed.count - cached), cached - placed.have
    rate = rates.prefill(placed.worker, now)
    rest = max(0.0, seconds - rate * computed)
    lower = [(tier, tokens) for tier, tokens in zip(TIERS[1:], placed.shares[1:], strict=False) if tokens]
    if lower:
        if len(lower) == 1 and 0 <= more < LEAST_TOKENS:
            [(tier, tokens)] = lower
            rates.loaded(tier, tokens, rest)
    elif placed.missing >= LEAST_GAIN and more >= LEAST_TOKENS:
        rates.fetched(more, rest)
    else:
        rates.prefilled(placed.worker, computed, seconds, now)
        if placed.missing >= LEAST_GAIN and rates.peer() is not None:
            rates.fetched(placed.missing, rate * placed.missing)  # it was computed after all

"""A load in a queue: how many requests a pool would make wait too long, and the smallest pool that makes few wait. The
functions are pure."""

from collections.abc import Sequence
from dataclasses import dataclass

MOST_FACTOR = 3.0
"""Largest `load_factor`."""
ROUNDS = 10
"""Halvings of the interval that holds a load factor."""


@dataclass(frozen=True, slots=True)
class TrafficSpan:
    """Requests that arrive evenly over `seconds`."""

    rate: float
    """Requests per second."""
    seconds: float
    ready: int = 0
    """Workers that served them."""
    weight: float = 1.0
    """Work of one of the requests, relative to the mean request."""


def late_share(
    spans: Sequence[TrafficSpan], capacity: float, patience: float, size: int | None, factor: float = 1.0
) -> float:
    """Share of the requests that wait longer than `patience` seconds, if `size` workers serve `capacity` requests per second
    each. If `size` is None, each span has as many workers as there were.

    The queue is a fluid: it grows by factor * weight * rate - service, and a request waits queue / service seconds.
    """
    queue = late = total = 0.0
    for span in spans:
        service = capacity * (span.ready if size is None else size)
        growth, limit = factor * span.weight * span.rate - service, patience * service
        late += span.rate * _seconds_above(queue, growth, limit, span.seconds)
        queue = max(0.0, queue + growth * span.seconds)
        total += span.rate * span.seconds
    return late / total if total > 0.0 else 0.0


def smallest_pool(
    spans: Sequence[TrafficSpan], capacity: float, patience: float, allowed: float, sizes: range, factor: float = 1.0
) -> int:
    """The smallest of `sizes` with at most the share `allowed` late; the largest if none is enough. More load, a smaller share
    or less capacity never give a smaller pool."""
    low, high = sizes[0], sizes[-1]
    while low < high:
        middle = (low + high) // 2
        if late_share(spans, capacity, patience, middle, factor) <= allowed:
            high = middle
        else:
            low = middle + 1
    return low


def load_factor(spans: Sequence[TrafficSpan], capacity: float, patience: float, missed: float) -> float:
    """The smallest factor on the load, at least 1, with which the queue explains the share `missed` of the objective.

    It stands for all that the capacity does not know: other lengths, bursts within a span, slower workers. Fewer misses than
    the queue predicts do not lower it, so that luck does not shrink a pool.
    """
    low, high = 1.0, MOST_FACTOR
    if late_share(spans, capacity, patience, None) >= missed:
        return low
    for _ in range(ROUNDS):
        middle = (low * high) ** 0.5
        if late_share(spans, capacity, patience, None, middle) > missed:
            high = middle
        else:
            low = middle
    return high


def _seconds_above(queue: float, growth: float, limit: float, seconds: float) -> float:
    """Time for which a queue that starts at `queue` and changes linearly is longer than `limit`."""
    if growth == 0.0:
        return seconds if queue > limit else 0.0
    crossing = min(max(0.0, (limit - queue) / growth), seconds)
    if growth > 0.0:
        return seconds - crossing
    return crossing if queue > limit else 0.0

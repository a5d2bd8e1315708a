"""Simple rules for the size of the target pool, to compare with the planner. Pure."""

import math
from collections import deque
from collections.abc import Sequence

from paceline.planning.observation import Observation, Sizes

QUEUE, KV_USE = 5, 0.8
"""Waiting requests of a worker, and used share of its cache, from which it counts as saturated."""
STABLE_SECONDS = 300.0
"""Time over which a lower size must hold before a pool shrinks."""


class FixedSize:
    """Keeps the same size all the time."""

    interval = 10.0

    def __init__(self, size: int) -> None:
        self._size = size

    def decide(self, observation: Observation) -> Sizes:
        return {"target": self._size}


class TimetableRule:
    """Sizes that were decided before: (time, workers), in order."""

    interval = 10.0

    def __init__(self, sizes: Sequence[tuple[float, int]]) -> None:
        self._sizes = sizes

    def decide(self, observation: Observation) -> Sizes:
        due = [size for time, size in self._sizes if time <= observation.time]
        return {"target": due[-1] if due else self._sizes[0][1]}


class QueueThreshold:
    """One worker more while workers are saturated, one less while they would not be with one fewer."""

    interval = 10.0

    def __init__(self, most: int) -> None:
        self._most = most
        self._calm_since: float | None = None

    def decide(self, observation: Observation) -> Sizes:
        pool = observation.pool("target")
        size, ready = pool.ready_or_starting, max(1, pool.ready)
        queue = observation.waiting / ready
        if queue > QUEUE or observation.kv_use > KV_USE:
            self._calm_since = None
            return {"target": min(self._most, size + 1 if not pool.starting else size)}
        is_calm = ready > 1 and observation.waiting / (ready - 1) < QUEUE / 5 and observation.kv_use < KV_USE / 2
        if not is_calm:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = observation.time
        elif observation.time - self._calm_since >= STABLE_SECONDS / 5:
            self._calm_since = observation.time
            return {"target": max(1, size - 1)}
        return {"target": size}


class UtilisationTarget:
    """ceil(size * utilisation / target), the largest of the last five minutes, as a horizontal pod autoscaler has it."""

    interval = 15.0

    def __init__(self, most: int, target: float = 0.6) -> None:
        self._most, self._target = most, target
        self._wanted: deque[tuple[float, int]] = deque()

    def decide(self, observation: Observation) -> Sizes:
        ready = max(1, observation.pool("target").ready)
        wanted = max(1, math.ceil(ready * observation.busy / self._target - 0.1))
        self._wanted.append((observation.time, wanted))
        while self._wanted[0][0] < observation.time - STABLE_SECONDS:
            self._wanted.popleft()
        return {"target": min(self._most, max(size for _, size in self._wanted))}

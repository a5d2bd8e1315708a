"""Whether a worker may be trusted with streams. Pure: what was heard and when, in; a state, out."""

from dataclasses import dataclass
from enum import Enum

from paceline.core.cluster_config import HealthConfig

DOUBTS = 2
"""Canaries in a row that must go wrong: one may have been a rounding's difference on busy hardware."""


class WorkerState(Enum):
    STARTING = "starting"
    """Not heard of yet, or not since it was lost."""
    READY = "ready"
    SUSPECTED = "suspected"
    """Silent or stuck: its streams are continued elsewhere. It may come back."""
    UNHEALTHY = "unhealthy"
    """It answers, and says something else than its peers: it gets nothing but canaries until it agrees again."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """A sign of life."""

    epoch: int
    """Of the worker's start: another one means that everything it held is gone."""
    steps: int
    """Engine steps since then."""
    busy: bool
    """Whether it has something to do."""


class WorkerHealth:
    """Follows one worker. Times are seconds on the caller's clock."""

    def __init__(self, config: HealthConfig) -> None:
        self._config = config
        self._heard: float | None = None
        self._pulse: Pulse | None = None
        self._moved = 0.0
        self._doubts = 0
        self._is_cut = False

    @property
    def epoch(self) -> int | None:
        return None if self._pulse is None else self._pulse.epoch

    @property
    def in_doubt(self) -> bool:
        """Whether the last canary went wrong: better ask again soon."""
        return self._doubts > 0

    def heard(self, pulse: Pulse, now: float) -> bool:
        """Returns whether the worker started anew since it was last heard: what it held is gone."""
        last, self._pulse = self._pulse, pulse
        self._heard, self._is_cut = now, False
        restarted = last is not None and last.epoch != pulse.epoch
        if restarted:
            self._doubts = 0
        if last is None or restarted or not pulse.busy or not last.busy or pulse.steps != last.steps:
            self._moved = now
        return restarted

    def cut(self) -> None:
        """The connection broke: what was under way on it is lost, and until it is heard again so is the worker."""
        self._is_cut = True

    def canary(self, agrees: bool) -> None:
        self._doubts = 0 if agrees else self._doubts + 1

    def state(self, now: float) -> WorkerState:
        if self._heard is None or self._pulse is None:
            return WorkerState.STARTING
        if self._is_cut or now - self._heard > self._config.heartbeat * self._config.misses:
            return WorkerState.SUSPECTED
        if self._pulse.busy and now - self._moved > self._config.stall:
            return WorkerState.SUSPECTED
        return WorkerState.UNHEALTHY if self._doubts >= DOUBTS else WorkerState.READY

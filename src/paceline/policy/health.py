"""Health of workers: whether a worker may serve streams, whether its canaries agree, and when it is restarted. Pure."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from paceline.core.cluster_config import HealthConfig

MAX_WRONG_CANARIES = 2
"""Wrong canaries in a row that make a worker unhealthy. A single one may be a rounding difference under load."""


UNMEASURED_STEP_SECONDS = 60.0
"""Longest step that may compile kernels or capture graphs: the first ones of a size."""


class WorkerState(Enum):
    JOINING = "joining"
    """No heartbeat yet."""
    READY = "ready"
    SUSPECTED = "suspected"
    """Silent or stalled. Its streams are continued on other workers; it may recover."""
    UNHEALTHY = "unhealthy"
    """Its canaries differ from those of the pool. It receives only canaries until they agree again."""


@dataclass(frozen=True, slots=True)
class StepProgress:
    """The part of a heartbeat that health depends on."""

    epoch: int
    """Epoch of the worker. Another epoch means that the worker restarted and lost its state."""
    steps: int
    """Engine steps since the start."""
    is_busy: bool
    """Whether the engine has work."""
    step_seconds: float | None = None
    """Longest time that the current step should take. None if no step of its size was measured yet."""


class StallDetector:
    """Whether an engine with work makes steps in the time that they should take. Times are seconds on the caller's clock."""

    def __init__(self, slack: float, unmeasured: float = UNMEASURED_STEP_SECONDS) -> None:
        """`slack` is the time in seconds that a step may take beyond its predicted time. A step without a prediction may take
        `unmeasured` seconds."""
        self._slack, self._unmeasured = slack, unmeasured
        self._progress: StepProgress | None = None
        self._last_step = 0.0

    def observe(self, progress: StepProgress, now: float) -> None:
        last, self._progress = self._progress, progress
        if (
            last is None
            or not progress.is_busy
            or (progress.epoch, progress.steps) != (last.epoch, last.steps)
            or not last.is_busy
        ):
            self._last_step = now

    def is_stalled(self, now: float) -> bool:
        if self._progress is None or not self._progress.is_busy:
            return False
        seconds = self._progress.step_seconds
        return now - self._last_step > (self._unmeasured if seconds is None else self._slack + seconds)

    def forgive(self, seconds: float) -> None:
        """Do not count the last `seconds`, in which the observer was suspended."""
        self._last_step += seconds


class WorkerHealth:
    """Health of one worker. Times are seconds on the caller's clock."""

    def __init__(self, config: HealthConfig) -> None:
        self._config = config
        self._last_heartbeat: float | None = None
        self._progress: StepProgress | None = None
        self._steps = StallDetector(config.stall)
        self._num_wrong_canaries = 0
        self._is_disconnected = False

    @property
    def epoch(self) -> int | None:
        return None if self._progress is None else self._progress.epoch

    @property
    def is_in_doubt(self) -> bool:
        """Whether the last canary was wrong."""
        return self._num_wrong_canaries > 0

    def heartbeat(self, progress: StepProgress, now: float) -> bool:
        """Returns whether the worker has restarted since the last heartbeat."""
        last, self._progress = self._progress, progress
        self._last_heartbeat, self._is_disconnected = now, False
        restarted = last is not None and last.epoch != progress.epoch
        if restarted:
            self._num_wrong_canaries = 0
        self._steps.observe(progress, now)
        return restarted

    def silent_seconds(self, now: float) -> float:
        """Time since the last heartbeat; 0 before the first one and after the connection broke."""
        return 0.0 if self._last_heartbeat is None or self._is_disconnected else now - self._last_heartbeat

    def forgive(self, seconds: float) -> None:
        """The gateway was suspended for `seconds` and requested no heartbeats: they do not count."""
        if self._last_heartbeat is not None:
            self._last_heartbeat += seconds
        self._steps.forgive(seconds)

    @property
    def is_disconnected(self) -> bool:
        """Whether the connection broke since the last heartbeat."""
        return self._is_disconnected

    def disconnected(self) -> None:
        """The connection broke. The worker is suspected until its next heartbeat."""
        self._is_disconnected = True

    def canary(self, agrees: bool) -> None:
        self._num_wrong_canaries = 0 if agrees else self._num_wrong_canaries + 1

    def state(self, now: float) -> WorkerState:
        if self._last_heartbeat is None or self._progress is None:
            return WorkerState.JOINING
        if self._is_disconnected or now - self._last_heartbeat > self._config.heartbeat * self._config.misses:
            return WorkerState.SUSPECTED
        if self._steps.is_stalled(now):
            return WorkerState.SUSPECTED
        return WorkerState.UNHEALTHY if self._num_wrong_canaries >= MAX_WRONG_CANARIES else WorkerState.READY


class CanaryVote:
    """Compares the canary tokens of all workers of a pool.

    Under coupled verification the tokens depend on the seed and the model only, so healthy workers generate the same ones.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, tuple[int, ...]] = {}
        self._majority: tuple[int, ...] | None = None

    def add(self, worker: str, tokens: tuple[int, ...]) -> Mapping[str, bool]:
        """Whether each worker with a result agrees with the majority.

        In a tie the previous majority stays; without one, the first result counts.
        """
        self._tokens[worker] = tokens
        votes = Counter(self._tokens.values())
        most = max(votes.values())
        candidates = [worker_tokens for worker_tokens, count in votes.items() if count == most]
        if self._majority not in candidates:
            self._majority = candidates[0]
        return {name: worker_tokens == self._majority for name, worker_tokens in self._tokens.items()}

    def forget(self, worker: str) -> None:
        """Drop the result of a worker that left or restarted."""
        self._tokens.pop(worker, None)


@dataclass(frozen=True, slots=True)
class BackoffRule:
    first: float = 0.5
    """Delay after the first failure, seconds."""
    max_delay: float = 30.0
    reset_after: float = 60.0
    """Uptime in seconds after which earlier failures no longer count."""


class Backoff:
    """Restart delay of a failed worker; it doubles with each failure in a row."""

    def __init__(self, rule: BackoffRule | None = None) -> None:
        self._rule = rule or BackoffRule()
        self.num_failures = 0
        """Failures in a row."""

    def delay(self, uptime: float) -> float:
        """Seconds to wait after a failure at `uptime` seconds."""
        if uptime >= self._rule.reset_after:
            self.num_failures = 0
        seconds = min(self._rule.max_delay, self._rule.first * 2.0**self.num_failures)
        self.num_failures += 1
        return seconds

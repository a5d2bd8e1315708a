"""Health of workers: whether a peer answers, whether a worker may serve streams, whether its canaries agree, and when it is
restarted. The functions are pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest

from paceline.core.cluster_config import HealthConfig

MAX_WRONG_CANARIES = 2
"""Wrong canaries in a row that make a worker unhealthy. A single one may be a rounding difference under load."""


UNMEASURED_STEP_SECONDS = 60.0
"""Longest step that may compile kernels or capture graphs: the first ones of a size."""


class PeerState(Enum):
    JOINING = "joining"
    """The handshake is not complete."""
    READY = "ready"
    SUSPECTED = "suspected"
    """Ready, but silent or disconnected since its last answer."""
    LOST = "lost"
    """Not used any more. The handshake is repeated after a pause."""
    REFUSED = "refused"
    """It does not fit. The handshake is repeated, because the peer may restart with another configuration."""


@dataclass(frozen=True, slots=True)
class LivenessRules:
    silent_seconds: float
    """Longest silence of a peer that is not suspected."""
    counts_from_ping: bool = False
    """Whether a silence begins with the first ping that has no answer. Otherwise it begins with the last answer."""


class Liveness:
    """Whether a peer answers. Times are seconds on the caller's clock."""

    def __init__(self, rules: LivenessRules) -> None:
        self._rules = rules
        self.epoch: int | None = None
        """Epoch of the peer's process. It is None before the first handshake."""
        self.standing = PeerState.JOINING
        """The result of the handshake, or the last decision about the peer. It is never `SUSPECTED`."""
        self.is_disconnected = False
        """Whether the connection broke since the last answer."""
        self._silent_since: float | None = None

    def observe_sent(self, now: float) -> None:
        """A ping was sent."""
        if self._rules.counts_from_ping and self._silent_since is None:
            self._silent_since = now

    def observe_answer(self, epoch: int | None, now: float) -> bool:
        """An answer arrived. It completes the handshake with the process of this epoch, unless `epoch` is None. Returns whether
        the peer has restarted."""
        self._silent_since = None if self._rules.counts_from_ping else now
        self.is_disconnected = False
        if epoch is None:
            return False
        restarted = self.epoch is not None and self.epoch != epoch
        self.epoch, self.standing = epoch, PeerState.READY
        return restarted

    def disconnected(self) -> None:
        """The connection broke. A ready peer is suspected until its next answer."""
        self.is_disconnected = True

    def decide(self, standing: PeerState) -> None:
        """The peer must repeat the handshake. It is lost, refused or joining until then."""
        self.standing, self.is_disconnected, self._silent_since = standing, False, None

    def forgive(self, seconds: float) -> None:
        """Do not count the last `seconds`, in which the observer was suspended."""
        if self._silent_since is not None:
            self._silent_since += seconds

    @property
    def is_awaited(self) -> bool:
        """Whether a ping has no answer yet, if silences are counted from pings."""
        return self._rules.counts_from_ping and self._silent_since is not None

    def silent_seconds(self, now: float) -> float:
        """Length of the current silence. 0 before the handshake and after the connection broke."""
        return 0.0 if self._silent_since is None or self.is_disconnected else now - self._silent_since

    def state(self, now: float) -> PeerState:
        is_silent = self.is_disconnected or self.silent_seconds(now) > self._rules.silent_seconds
        return PeerState.SUSPECTED if is_silent and self.standing is PeerState.READY else self.standing


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
        self.liveness = Liveness(LivenessRules(config.heartbeat * config.misses))
        self._steps = StallDetector(config.stall)
        self._num_wrong_canaries = 0

    @property
    def epoch(self) -> int | None:
        return self.liveness.epoch

    @property
    def is_in_doubt(self) -> bool:
        """Whether the last canary was wrong."""
        return self._num_wrong_canaries > 0

    def heartbeat(self, progress: StepProgress, now: float) -> bool:
        """Returns whether the worker has restarted since the last heartbeat."""
        restarted = self.liveness.observe_answer(progress.epoch, now)
        if restarted:
            self._num_wrong_canaries = 0
        self._steps.observe(progress, now)
        return restarted

    def silent_seconds(self, now: float) -> float:
        """Time since the last heartbeat; 0 before the first one and after the connection broke."""
        return self.liveness.silent_seconds(now)

    def forgive(self, seconds: float) -> None:
        """The gateway was suspended for `seconds` and requested no heartbeats: they do not count."""
        self.liveness.forgive(seconds)
        self._steps.forgive(seconds)

    @property
    def is_disconnected(self) -> bool:
        """Whether the connection broke since the last heartbeat."""
        return self.liveness.is_disconnected

    def disconnected(self) -> None:
        """The connection broke. The worker is suspected until its next heartbeat."""
        self.liveness.disconnected()

    def canary(self, agrees: bool) -> None:
        self._num_wrong_canaries = 0 if agrees else self._num_wrong_canaries + 1

    def state(self, now: float) -> WorkerState:
        state = self.liveness.state(now)
        if state is PeerState.JOINING:
            return WorkerState.JOINING
        if state is PeerState.SUSPECTED or self._steps.is_stalled(now):
            return WorkerState.SUSPECTED
        return WorkerState.UNHEALTHY if self._num_wrong_canaries >= MAX_WRONG_CANARIES else WorkerState.READY


def first_difference(tokens: Sequence[int], expected: Sequence[int]) -> str:
    """Where a text leaves the expected one, in words. Empty if it does not."""
    for index, (token, other) in enumerate(zip_longest(tokens, expected)):
        if token != other:
            return f"output token {index} is {_name(token)} in place of {_name(other)}"
    return ""


def _name(token: int | None) -> str:
    return "the end" if token is None else str(token)


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

    @property
    def num_results(self) -> int:
        return len(self._tokens)

    def difference(self, worker: str) -> str:
        """Where the tokens of a worker leave those of the majority, in words."""
        return first_difference(self._tokens.get(worker, ()), self._majority or ())

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

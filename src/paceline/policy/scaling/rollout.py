"""A rolling change of one pool: one worker at a time, compared before it gets traffic, rolled back on a failure. The
functions are pure."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from paceline.policy.scaling.desired import DesiredState, WorkerGoal, free_numbers

MAX_EXITS = 2
"""Exits of a new worker's process after which the change is rolled back."""
SETTLE_SECONDS = 1.5
"""Time in which all gateways learn that a worker serves, before the next one drains."""

Verdict = Literal["agrees", "differs"]


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as the rollout observes it."""

    revision: int
    is_ready: bool = False
    """Whether its handshake is done and its model is loaded."""
    num_exits: int = 0
    """Exits of its process since it started with this revision."""
    verdict: Verdict | None = None
    """Result of the last `Compare`."""


@dataclass(frozen=True, slots=True)
class SetGoal:
    """Make this the worker's goal."""

    goal: WorkerGoal


@dataclass(frozen=True, slots=True)
class Remove:
    """Drain this worker."""

    name: str


@dataclass(frozen=True, slots=True)
class Compare:
    """Generate the canary texts on this worker and compare them."""

    name: str


@dataclass(frozen=True, slots=True)
class Finished:
    failure: str = ""
    """Why the change was rolled back. It is empty if all workers have the new revision."""


Action: TypeAlias = SetGoal | Remove | Compare | Finished


@dataclass(frozen=True, slots=True)
class RolloutRule:
    start_seconds: float = 600.0
    """Longest time from a goal to a ready worker, without the drain of its predecessor."""
    drain_seconds: float = 25.0
    surge: bool = False
    """Whether one more worker runs during the change, so that the capacity stays whole."""
    compares: bool = True
    """Whether canary texts are compared. A draft worker generates no texts."""


class Rollout:
    """Call `next` until it returns `Finished`. If it returns None, wait. Times are seconds on the caller's clock."""

    def __init__(self, state: DesiredState, pool: str, revision: int, rule: RolloutRule) -> None:
        """Replaces the pool's workers that have another revision than `revision`."""
        goals = state.of_pool(pool)
        self._pool, self._revision, self._rule = pool, revision, rule
        self._old = {goal.name: goal.revision for goal in goals}
        names = [goal.name for goal in goals if goal.revision != revision]
        self._extra = f"{pool}-{free_numbers(goals, 1)[0]}" if rule.surge and names else None
        self._steps = deque(names if self._extra is None else [self._extra, *names])
        self._is_rolling_back = False
        self._failure = ""
        self._current: str | None = None
        self._deadline = self._settled = 0.0
        self._stage: Literal["wait", "compare", "settle", "leave"] = "wait"
        self._touched: list[str] = []

    def next(self, workers: Mapping[str, WorkerView], now: float) -> Action | None:
        """The next action, from the workers that run now."""
        if self._current is None:
            return self._begin(now)
        view = workers.get(self._current)
        if self._stage == "leave" and view is not None:
            return self._check_time(now)
        if self._stage == "settle" and now < self._settled:
            return None
        if self._stage in ("leave", "settle"):
            self._current = None
            return None
        if view is None or view.revision != self._target:
            return self._check_time(now)
        if view.num_exits >= MAX_EXITS:
            return self._fail(f"{self._current} exited {view.num_exits} times: see its log")
        if not view.is_ready:
            return self._check_time(now)
        if self._compares and self._stage == "wait":
            self._stage = "compare"
            return Compare(self._current)
        if self._stage == "compare":
            if view.verdict is None:
                return self._check_time(now)
            if view.verdict == "differs":
                return self._fail(f"{self._current} generates other canary texts than the workers before it")
        self._stage, self._settled = "settle", now + SETTLE_SECONDS
        return SetGoal(WorkerGoal(self._current, self._pool, self._target))

    @property
    def _target(self) -> int:
        """Revision that the current worker should get."""
        return self._old[self._current or ""] if self._is_rolling_back else self._revision

    @property
    def _compares(self) -> bool:
        return self._rule.compares and not self._is_rolling_back

    def _begin(self, now: float) -> Action | None:
        if not self._steps:
            return Finished(self._failure)
        self._current = name = self._steps.popleft()
        self._deadline = now + self._rule.start_seconds + self._rule.drain_seconds
        if name == self._extra and name in self._touched:
            self._stage = "leave"
            return Remove(name)
        self._stage = "wait"
        self._touched.append(name)
        if name == self._extra:
            self._steps.append(name)  # it leaves at the end
        return SetGoal(WorkerGoal(name, self._pool, self._target, is_on_trial=self._compares))

    def _check_time(self, now: float) -> Action | None:
        return None if now < self._deadline else self._fail(f"{self._current} was not ready in time: see its log")

    def _fail(self, reason: str) -> Action | None:
        """Roll back what has changed, the failed worker first. A failure of the roll-back ends the rollout."""
        if self._is_rolling_back:
            return Finished(f"{self._failure}; the roll-back failed: {reason}")
        self._is_rolling_back, self._failure = True, reason
        changed: Sequence[str] = [name for name in reversed(self._touched) if name != self._extra]
        self._steps = deque(changed)
        if self._extra is not None and self._extra in self._touched:
            if self._current == self._extra:
                self._steps.appendleft(self._extra)
            else:
                self._steps.append(self._extra)
        self._current = None
        return None

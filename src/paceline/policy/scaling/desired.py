"""The desired state of a cluster: the workers that should run, each with a revision of the settings, and the
workers to start and to drain for it. The functions are pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import InvalidConfig
from paceline.core.pool_config import PoolConfig


@dataclass(frozen=True, slots=True)
class WorkerGoal:
    """A worker that should run."""

    name: str
    pool: str
    revision: int = 0
    is_on_trial: bool = False
    """Whether gateways send it canaries only."""

    @property
    def number(self) -> int:
        """Its number in the pool, which decides its device."""
        return int(self.name.rpartition("-")[2])


@dataclass(frozen=True, slots=True)
class DesiredState:
    revisions: Mapping[int, ClusterConfig]
    """Settings by revision. New workers get the newest one."""
    workers: tuple[WorkerGoal, ...]
    drain_seconds: float
    """Time that a worker has to drain, if this state drains it."""

    @staticmethod
    def of(config: ClusterConfig) -> "DesiredState":
        """All workers of the file, at revision 0."""
        goals = tuple(WorkerGoal(name, pool.name) for pool in config.pools for name in pool.worker_names)
        return DesiredState({0: config}, goals, config.drain_seconds)

    @property
    def newest(self) -> int:
        return max(self.revisions)

    @property
    def config(self) -> ClusterConfig:
        """The newest settings, with the number of workers that each pool should have."""
        config = self.revisions[self.newest]
        counts = {pool.name: len(self.of_pool(pool.name)) for pool in config.pools}
        return replace(config, pools=tuple(replace(pool, replicas=counts[pool.name]) for pool in config.pools))

    def goal(self, name: str) -> WorkerGoal | None:
        return next((goal for goal in self.workers if goal.name == name), None)

    def of_pool(self, pool: str) -> tuple[WorkerGoal, ...]:
        return tuple(sorted((goal for goal in self.workers if goal.pool == pool), key=lambda goal: goal.number))

    def scaled(self, pool: str, count: int) -> "DesiredState":
        """`count` workers in the pool. Workers with the highest numbers leave; the lowest free numbers join."""
        settings = _pool(self.revisions[self.newest], pool)
        replace(settings, replicas=count)  # raises `InvalidConfig` for a count that the role does not allow
        goals = self.of_pool(pool)[:count]
        for number in free_numbers(goals, count - len(goals)):
            goals += (WorkerGoal(f"{pool}-{number}", pool, self.newest),)
        return self._with([goal for goal in self.workers if goal.pool != pool] + list(goals))

    def without(self, name: str) -> "DesiredState":
        """The state after the worker left; its pool is smaller by one. Raises `InvalidConfig` for an unknown or last worker."""
        goal = self.goal(name)
        if goal is None:
            names = ", ".join(goal.name for goal in self.workers)
            raise InvalidConfig(f"there is no worker {name!r}; the workers are {names}")
        settings = _pool(self.revisions[self.newest], goal.pool)
        replace(settings, replicas=len(self.of_pool(goal.pool)) - 1)
        return self._with([other for other in self.workers if other != goal])

    def with_goal(self, goal: WorkerGoal) -> "DesiredState":
        """The goal takes the place of that with its name, or is added."""
        return self._with([other for other in self.workers if other.name != goal.name] + [goal])

    def without_goal(self, name: str) -> "DesiredState":
        return self._with([goal for goal in self.workers if goal.name != name])

    def with_revision(self, config: ClusterConfig) -> "DesiredState":
        """A new revision that no worker has yet."""
        return replace(self, revisions={**self.revisions, self.newest + 1: config})

    def settled(self, revision: int) -> "DesiredState":
        """Every worker that runs with other settings than `revision` keeps them; revisions that no worker has are dropped.
        `revision` is the one of new workers."""
        kept = {goal.revision for goal in self.workers} | {revision}
        return replace(self, revisions={key: value for key, value in self.revisions.items() if key in kept})

    def without_revision(self, revision: int) -> "DesiredState":
        """The state after a roll-back: `revision` is not the one of new workers. Workers that still have it keep it."""
        if any(goal.revision == revision for goal in self.workers):
            return self
        return replace(self, revisions={key: value for key, value in self.revisions.items() if key != revision})

    def _with(self, goals: Iterable[WorkerGoal]) -> "DesiredState":
        order = {pool.name: i for i, pool in enumerate(self.revisions[self.newest].pools)}
        return replace(
            self, workers=tuple(sorted(goals, key=lambda goal: (order.get(goal.pool, len(order)), goal.number)))
        )


def free_numbers(goals: Iterable[WorkerGoal], count: int) -> list[int]:
    """The `count` lowest numbers that no goal has."""
    used, found, number = {goal.number for goal in goals}, list[int](), 0
    while len(found) < count:
        if number not in used:
            found.append(number)
        number += 1
    return found


def _pool(config: ClusterConfig, name: str) -> PoolConfig:
    for pool in config.pools:
        if pool.name == name:
            return pool
    raise InvalidConfig(f"there is no pool {name!r}; the pools are {', '.join(pool.name for pool in config.pools)}")


@dataclass(frozen=True, slots=True)
class RunningWorker:
    revision: int
    is_draining: bool = False


@dataclass(frozen=True, slots=True)
class Actions:
    start: tuple[WorkerGoal, ...] = ()
    drain: tuple[str, ...] = ()


def next_actions(desired: DesiredState, running: Mapping[str, RunningWorker]) -> Actions:
    """A worker that should not run, or with another revision, drains. Once it is gone, its goal starts again."""
    goals = {goal.name: goal for goal in desired.workers}
    start = tuple(goal for goal in desired.workers if goal.name not in running)
    drain = tuple(
        name
        for name, worker in running.items()
        if not worker.is_draining and (name not in goals or goals[name].revision != worker.revision)
    )
    return Actions(start, drain)

"""Which workers to start and to drain now, so that the running workers become the desired ones. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.cluster.scaling.desired import DesiredState, WorkerGoal


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

"""Rolling changes of a simulated pool."""

from dataclasses import dataclass, field, replace

import pytest

from paceline.core.cluster_config import ClusterConfig
from paceline.core.pool_config import PoolConfig
from paceline.policy.scaling.desired import DesiredState, RunningWorker, next_actions
from paceline.policy.scaling.rollout import (
    Compare,
    Finished,
    Remove,
    Rollout,
    RolloutRule,
    SetGoal,
    Verdict,
    WorkerView,  # fmt: skip
)

START, DRAIN = 3, 2
"""Ticks that a start and a drain take."""


@dataclass
class Worker:
    revision: int
    is_on_trial: bool
    age: int = 0
    draining: int | None = None
    verdict: Verdict | None = None


@dataclass
class SimulatedPool:
    """Workers that take a while to start and to drain. Those of revision 1 may not start, or generate other texts."""

    size: int
    starts: bool = True
    agrees: bool = True
    exits: int = 0
    fails_from: int = 0
    """Number of the first new worker that fails."""
    state: DesiredState = field(init=False)
    running: dict[str, Worker] = field(init=False)
    capacity: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = ClusterConfig((PoolConfig("t", "target", "m", replicas=self.size),))
        self.state = DesiredState.of(config).with_revision(config)
        self.running = {goal.name: Worker(0, False, START) for goal in self.state.workers}

    def roll(self, **rule: bool) -> str:
        rollout = Rollout(self.state, "t", 1, RolloutRule(start_seconds=20, drain_seconds=5, **rule))
        for now in range(1000):
            action = rollout.next({name: self.view(name) for name in self.running}, now)
            match action:
                case Finished():
                    return action.failure
                case SetGoal():
                    self.state = self.state.with_goal(action.goal)
                case Remove():
                    self.state = self.state.without_goal(action.name)
                case Compare():
                    self.running[action.name].verdict = (
                        "agrees" if not self.fails(action.name) or self.agrees else "differs"
                    )
            self.tick()
        raise AssertionError("the rollout does not end")

    def fails(self, name: str) -> bool:
        new = [other for other, worker in self.running.items() if worker.revision == 1]
        return new.index(name) >= self.fails_from if name in new else False

    def view(self, name: str) -> WorkerView:
        worker = self.running[name]
        is_bad = self.fails(name)
        return WorkerView(
            worker.revision,
            worker.age >= START and worker.draining is None and (self.starts or not is_bad),
            self.exits if is_bad else 0,
            worker.verdict,
        )

    def tick(self) -> None:
        actions = next_actions(
            self.state,
            {name: RunningWorker(one.revision, one.draining is not None) for name, one in self.running.items()},
        )
        for name in actions.drain:
            self.running[name].draining = DRAIN
        for goal in actions.start:
            self.running[goal.name] = Worker(goal.revision, goal.is_on_trial)
        for name, worker in list(self.running.items()):
            worker.age += 1
            goal_now = self.state.goal(name)
            worker.is_on_trial = goal_now is not None and goal_now.is_on_trial and worker.revision == goal_now.revision
            if worker.draining is not None:
                worker.draining -= 1
                if worker.draining < 0:
                    del self.running[name]
        serving = [name for name, one in self.running.items() if self.view(name).is_ready and not one.is_on_trial]
        self.capacity.append(len(serving))

    def revisions(self) -> list[tuple[str, int]]:
        return sorted((name, worker.revision) for name, worker in self.running.items())


@pytest.mark.parametrize("size", [1, 2, 5])
def test_capacity_stays_above_all_but_one(size: int) -> None:
    pool = SimulatedPool(size)
    assert pool.roll() == ""
    assert pool.revisions() == [(f"t-{i}", 1) for i in range(size)]
    assert min(pool.capacity) == size - 1


@pytest.mark.parametrize("size", [1, 3])
def test_capacity_stays_whole_with_surge(size: int) -> None:
    pool = SimulatedPool(size)
    assert pool.roll(surge=True) == ""
    assert pool.revisions() == [(f"t-{i}", 1) for i in range(size)]
    assert min(pool.capacity) == size


@pytest.mark.parametrize("surge", [False, True])
@pytest.mark.parametrize("fails_from", [0, 1])
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (replace(SimulatedPool(3), agrees=False), "other canary texts"),
        (replace(SimulatedPool(3), starts=False), "not ready in time"),
        (replace(SimulatedPool(3), starts=False, exits=2), "exited 2 times"),
    ],
)
def test_a_bad_revision_is_rolled_back(bad: SimulatedPool, reason: str, fails_from: int, surge: bool) -> None:
    pool = replace(bad, fails_from=fails_from, capacity=[])
    assert reason in pool.roll(surge=surge)
    assert pool.revisions() == [("t-0", 0), ("t-1", 0), ("t-2", 0)]
    assert min(pool.capacity) >= 2


def test_a_failed_roll_back_ends_the_rollout() -> None:
    pool = SimulatedPool(1, starts=False)
    rollout = Rollout(pool.state, "t", 1, RolloutRule(start_seconds=1, drain_seconds=0))
    reasons = [action for now in range(9) if isinstance(action := rollout.next({}, now), Finished)]
    assert "the roll-back failed: t-0 was not ready in time" in reasons[0].failure


def test_texts_of_drafts_are_not_compared() -> None:
    pool = SimulatedPool(2, agrees=False)
    assert pool.roll(compares=False) == ""
    assert pool.revisions() == [("t-0", 1), ("t-1", 1)]


def test_workers_with_the_revision_stay() -> None:
    pool = SimulatedPool(2)
    pool.roll()
    before = dict(pool.running)
    assert pool.roll(surge=True) == ""
    assert pool.running == before

"""The plan of `paceline apply`: what a new cluster file changes in a running cluster. The functions are pure."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import InvalidConfig
from paceline.core.pool_config import PoolConfig
from paceline.policy.scaling.desired import DesiredState, WorkerGoal

FIXED = ("name", "host", "keys", "state_dir", "ray")
"""Settings that a running cluster cannot change: all its workers use them to find and trust each other."""
OF_GATEWAYS = ("gateway", "health")
"""Settings that only gateways read, when they start."""

Action = Literal["start", "drain", "replace"]


@dataclass(frozen=True, slots=True)
class Change:
    action: Action
    workers: tuple[str, ...]
    pool: str
    reason: str


@dataclass(frozen=True, slots=True)
class ChangePlan:
    """Changes in the order in which they are made: start, replace one at a time, drain."""

    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()
    """What the plan does not do."""

    def pools_to_replace(self) -> tuple[str, ...]:
        return tuple(change.pool for change in self.changes if change.action == "replace")


def plan(state: DesiredState, config: ClusterConfig) -> ChangePlan:
    """What changes if `config` is applied. Raises `InvalidConfig` for a setting that a running cluster cannot change."""
    before = state.config
    for key in FIXED:
        if getattr(before, key) != getattr(config, key):
            raise InvalidConfig(f"{key} cannot change while the cluster runs: use `paceline down`, then `paceline up`")
    notes = tuple(
        f"{key} changed: restart the gateways, one at a time"
        for key in OF_GATEWAYS
        if getattr(before, key) != getattr(config, key)
    )
    starts, replaced, drains = list[Change](), list[Change](), list[Change]()
    old_pools = {pool.name: pool for pool in before.pools}
    for pool in config.pools:
        goals, old = state.of_pool(pool.name), old_pools.get(pool.name)
        if old is not None and old.role != pool.role:
            raise InvalidConfig(f"pool {pool.name!r} is a {old.role} pool: give the new {pool.role} pool another name")
        after = applied(state, config).of_pool(pool.name)
        reason = "new pool" if old is None else f"replicas {len(goals)} -> {pool.replicas}"
        if added := _names(after, goals):
            starts.append(Change("start", added, pool.name, reason))
        if left := _names(goals, after):
            drains.append(Change("drain", left, pool.name, reason))
        differences = {goal.name: _worker_changes(state, goal, config) for goal in goals if goal.name not in left}
        changed = {name: reasons for name, reasons in differences.items() if reasons}
        if changed:
            reason = "; ".join(dict.fromkeys(reason for reasons in changed.values() for reason in reasons))
            replaced.append(Change("replace", tuple(changed), pool.name, reason))
    for name in old_pools.keys() - {pool.name for pool in config.pools}:
        drains.append(Change("drain", _names(state.of_pool(name), ()), name, "the pool is not in the file"))
    check_memory(state, applied(state, config))
    return ChangePlan((*starts, *replaced, *drains), notes)


def _worker_changes(state: DesiredState, goal: WorkerGoal, config: ClusterConfig) -> list[str]:
    """Settings in which the worker's revision differs from `config`."""
    own = state.revisions[goal.revision]
    old, new = (next(pool for pool in revision.pools if pool.name == goal.pool) for revision in (own, config))
    return [
        *_differences(_cluster_settings(own), _cluster_settings(config)),
        *_differences(_pool_settings(old), _pool_settings(new)),
    ]


def applied(state: DesiredState, config: ClusterConfig) -> DesiredState:
    """The state with the pools and replicas of `config`. Workers that stay keep their revision; new ones get the new one."""
    return with_pools(state.with_revision(config), config)


def with_pools(state: DesiredState, config: ClusterConfig) -> DesiredState:
    """The state with as many workers as the pools of `config` have. Workers of other pools leave."""
    names = {pool.name for pool in config.pools}
    after = state
    for goal in state.workers:
        if goal.pool not in names:
            after = after.without_goal(goal.name)
    for pool in config.pools:
        after = after.scaled(pool.name, pool.replicas)
    return after


def resized(state: DesiredState, pool: str, count: int) -> DesiredState:
    """The state with `count` workers in a pool. Raises `InvalidConfig` if a new one does not fit on its GPU."""
    after = state.scaled(pool, count)
    check_memory(state, after)
    return after


def check_memory(before: DesiredState, after: DesiredState) -> None:
    """Raise `InvalidConfig` if a new worker does not fit on a GPU in addition to the running workers, which keep the memory
    they have."""
    shares = _gpu_shares(before)
    running = {goal.name for goal in before.workers}
    added = {name: share for name, share in _gpu_shares(after).items() if name not in running}
    for name, (device, share) in added.items():
        used = sum(other for where, other in shares.values() if where == device)
        used += sum(other for key, (where, other) in added.items() if where == device and key != name)
        if used + share > 1.0:
            raise InvalidConfig(
                f"{name} needs {share:.2f} of the memory of {device}, and {used:.2f} is taken: set limits.memory_fraction of "
                "the pools on this device, or give the pool more devices"
            )


def _gpu_shares(state: DesiredState) -> Mapping[str, tuple[str, float]]:
    """Device and memory fraction of each worker on a GPU that other workers may share."""
    config = with_numbers(state)
    engines = config.engines()
    pools = {pool.name: pool for pool in config.pools}
    return {
        goal.name: (engines[goal.name].device, engines[goal.name].memory_fraction)
        for goal in state.workers
        if engines[goal.name].device.startswith("cuda") and not pools[goal.pool].ray.num_gpus
    }


def with_numbers(state: DesiredState, revision: int | None = None) -> ClusterConfig:
    """Settings of a revision, the newest by default, in which every pool reaches the highest number of its workers."""
    config = state.revisions[state.newest if revision is None else revision]
    pools = []
    for pool in config.pools:
        count = max((goal.number + 1 for goal in state.of_pool(pool.name)), default=0)
        pools.append(replace(pool, replicas=count if count or pool.role != "target" else 1))
    return replace(config, pools=tuple(pools))


def _names(goals: tuple[WorkerGoal, ...], others: tuple[WorkerGoal, ...]) -> tuple[str, ...]:
    known = {goal.name for goal in others}
    return tuple(goal.name for goal in goals if goal.name not in known)


def _cluster_settings(config: ClusterConfig) -> Mapping[str, Any]:
    return {key: value for key, value in asdict(config).items() if key not in ("pools", *FIXED, *OF_GATEWAYS)}


def _pool_settings(pool: PoolConfig) -> Mapping[str, Any]:
    return {key: value for key, value in asdict(pool).items() if key not in ("name", "role", "replicas", "price")}


def _differences(before: Mapping[str, Any], after: Mapping[str, Any], where: str = "") -> Iterator[str]:
    for key in after:
        old, new = before.get(key), after[key]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{where}{key}.")
        elif old != new:
            yield f"{where}{key} {old} -> {new}"

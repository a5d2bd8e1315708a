"""The commands on live pools: `paceline scale`, `drain`, `apply` and `rollout`.

`scale` sets the number of workers in a pool, and `drain` ends one worker. `apply` makes a running cluster what its file says,
after a plan. `rollout` replaces the workers one at a time. The commands share their options, the running cluster, and the wait
until it is as desired.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import console
from paceline.cli.workers import FILE, Ray, check_before_start, cluster_of, running_config, state_of, view
from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import InvalidConfig
from paceline.core.status import WorkerStatus
from paceline.policy.scaling.changes import ChangePlan, applied, plan, resized, with_pools
from paceline.policy.scaling.desired import DesiredState
from paceline.policy.scaling.rollout import RolloutRule

if TYPE_CHECKING:
    from paceline.deploy.processes import LivePools
    from paceline.targets import TargetPool

POLL = 0.1

Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="CLUSTER.yaml",
        help="The file that the cluster was started with. Default: ./cluster.yaml, or else the one cluster that runs here.",
    ),
]
Wait = Annotated[float, typer.Option(min=0, help="Seconds to wait until the change is done.")]
DrainSeconds = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Seconds that streams have to finish before they continue elsewhere. Default: `drain_seconds` of the file.",
    ),
]
Surge = Annotated[
    bool | None,
    typer.Option(
        help="Run one more worker during the change, so that capacity stays whole. Default: for pools with one worker."
    ),
]
ModelChange = Annotated[
    bool,
    typer.Option(help="The texts may differ from now on. Without it, a worker with other canary texts is rolled back."),
]


class RunningCluster:
    """The running cluster and a gateway that observes it."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config

    def __enter__(self) -> "tuple[LivePools, TargetPool]":
        with console.waiting("reading the cluster"):
            from paceline.deploy import live_pools, observe_cluster

            pools = live_pools(self._config)
            self._observed = observe_cluster(self._config)
            return pools, self._observed.__enter__()

    def __exit__(self, *error: object) -> None:
        self._observed.__exit__(None, None, None)


def with_drain_seconds(state: DesiredState, config: ClusterConfig, seconds: float | None) -> DesiredState:
    return replace(state, drain_seconds=config.drain_seconds if seconds is None else seconds)


def unsettled(workers: Sequence[WorkerStatus], state: DesiredState) -> str:
    """What is missing until every desired worker is ready, and every other worker is gone. Empty if nothing is."""
    known = {worker.name for worker in workers}
    missing = [f"{goal.name} starts" for goal in state.workers if goal.name not in known]
    for worker in workers:
        if state.goal(worker.name) is None:
            missing += [] if worker.state == "gone" else [f"{worker.name} leaves: {worker.state}"]
        elif worker.state != "ready":
            missing.append(state_of(worker))
    return ", ".join(missing)


def wait_until_settled(gateway: "TargetPool", pools: "LivePools", seconds: float) -> bool:
    """Wait until the workers are as desired, and show what is missing. Returns whether they were within `seconds`."""
    with console.waiting("waiting for the workers") as show:
        deadline = time.monotonic() + seconds
        while missing := unsettled(gateway.workers(), pools.desired()):
            if time.monotonic() >= deadline:
                return False
            show(missing)
            time.sleep(POLL)
    return True


def finish(gateway: "TargetPool", pools: "LivePools", seconds: float) -> None:
    """Wait until the workers are as desired, and print them."""
    is_done = wait_until_settled(gateway, pools, seconds)
    console.out.print(view(gateway.workers()))
    if not is_done:
        console.fail(f"the workers were not as desired within {seconds:g} s")
        raise typer.Exit(1)


def scale(
    pool: Annotated[str, typer.Argument(metavar="POOL", help="A pool of the cluster.")],
    count: Annotated[int, typer.Argument(metavar="N", min=0, help="Workers that it should have.")],
    config: Config = None,
    drain_seconds: DrainSeconds = None,
    wait: Wait = 600.0,
    ray: Ray = None,
) -> None:
    """Change the number of workers in a pool. The file keeps its number: `paceline apply` returns to it.

    Exit status 1: some worker was not ready, or not gone, in time.
    """
    settings = running_config(config, ray)
    with RunningCluster(settings) as (pools, gateway):

        def change(state: DesiredState) -> DesiredState:
            return with_drain_seconds(resized(state, pool, count), settings, drain_seconds)

        before = pools.desired()
        if count > len(before.of_pool(pool)):
            check_before_start(_config(change(before)))
        pools.edit(change)
        finish(gateway, pools, wait)


def _config(state: DesiredState) -> ClusterConfig:
    """Settings of the newest revision, with as many workers as the state has."""
    pools = (replace(pool, replicas=len(state.of_pool(pool.name))) for pool in state.config.pools)
    return replace(state.config, pools=tuple(pools))


def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="A worker, such as target-1.")],
    config: Config = None,
    drain_seconds: DrainSeconds = None,
    wait: Wait = 600.0,
    ray: Ray = None,
) -> None:
    """Take one worker out of a cluster: no new streams, running ones finish or continue elsewhere, then its process exits.

    Its pool is smaller by one afterwards; `paceline scale` starts a new worker.
    """
    settings = running_config(config, ray)
    with RunningCluster(settings) as (pools, gateway):
        pools.edit(lambda state: with_drain_seconds(state.without(worker), settings, drain_seconds))
        finish(gateway, pools, wait)


def rollout(
    pool: Annotated[str | None, typer.Argument(metavar="POOL", help="A pool. Default: all pools.")] = None,
    config: Config = None,
    surge: Surge = None,
    model_change: ModelChange = False,
    drain_seconds: DrainSeconds = None,
    wait: Wait = 600.0,
    ray: Ray = None,
) -> None:
    """Replace the workers of a cluster one at a time, with the settings of the file and this version of the program.

    Without a file the workers keep their settings.

    A new worker gets traffic after its canary texts agree with those before. If they differ, or it does not start, the change
    stops and is rolled back, with exit status 1.
    """
    settings = running_config(config, ray)
    with RunningCluster(settings) as (pools, gateway):
        names = [spec.name for spec in settings.pools] if pool is None else [pool]
        if unknown := set(names) - {spec.name for spec in pools.desired().config.pools}:
            raise InvalidConfig(
                f"there is no pool {', '.join(sorted(unknown))} in the running cluster: use `paceline apply`"
            )
        check_before_start(settings)
        state = pools.edit(lambda state: with_drain_seconds(state.with_revision(settings), settings, drain_seconds))
        revision = state.newest
        for name in names:
            replace_workers(pools, gateway, settings, name, revision, surge, model_change, wait)
        pools.edit(lambda state: state.settled(revision))
        finish(gateway, pools, wait)


def replace_workers(
    pools: "LivePools",
    gateway: "TargetPool",
    config: ClusterConfig,
    name: str,
    revision: int,
    surge: bool | None,
    is_model_change: bool,
    wait: float,
) -> None:
    """Replace the workers of one pool. A failure ends the command after the roll-back."""
    from paceline.deploy.processes import RolloutRun

    state = pools.desired()
    role = next(pool.role for pool in config.pools if pool.name == name)
    rule = RolloutRule(
        wait,
        state.drain_seconds,
        surge=len(state.of_pool(name)) == 1 and role == "target" if surge is None else surge,
        compares=role != "draft",
    )
    run = RolloutRun(pools, gateway, lambda line: console.err.print(line, markup=False, soft_wrap=True))
    with console.waiting(f"replacing the workers of {name}"):
        failure = run.run(name, revision, rule, is_model_change)
    if failure:
        pools.edit(lambda state: state.without_revision(revision))
        console.fail(f"rolled back: {failure}")
        raise typer.Exit(1)


SIGNS = {"start": "+", "drain": "-", "replace": "~"}


def apply(
    file: Annotated[Path, typer.Argument(metavar="CLUSTER.yaml", help="The new cluster file.")] = FILE,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    surge: Surge = None,
    model_change: ModelChange = False,
    wait: Wait = 600.0,
    ray: Ray = None,
) -> None:
    """Make a running cluster what the file says, after a plan that it prints first.

    The file is checked as `paceline doctor CLUSTER.yaml` does; nothing changes if there is a problem.

    New workers start, workers with other settings are replaced one at a time (see `rollout`), then those that left the file
    drain. Exit status 1: the change was rolled back, or not done in time.
    """
    config = cluster_of(file, ray)
    with RunningCluster(config) as (pools, gateway):
        changes = plan(pools.desired(), config)
        show(changes)
        if not changes.changes:
            pools.edit(lambda state: replace(state, revisions={**state.revisions, state.newest: config}))
            return
        check_before_start(config)
        if not yes:
            typer.confirm("Apply?", abort=True)
        state = pools.edit(lambda state: _with_all(state, config))
        revision = state.newest
        wait_until_settled(gateway, pools, wait)
        for pool in changes.pools_to_replace():
            replace_workers(pools, gateway, config, pool, revision, surge, model_change, wait)
        pools.edit(lambda state: _final(state, config, revision))
        finish(gateway, pools, wait)


def show(changes: ChangePlan) -> None:
    """Print a plan, one line per pool and action."""
    for change in changes.changes:
        names = ", ".join(change.workers)
        action = f"{change.action}, one at a time" if change.action == "replace" else change.action
        console.out.print(f"{SIGNS[change.action]} {names}: {action} ({change.reason})", markup=False, soft_wrap=True)
    for note in changes.notes:
        console.out.print(f"! {note}", markup=False, soft_wrap=True)
    if not changes.changes:
        console.out.print("the workers are as the file says")


def _with_all(state: DesiredState, config: ClusterConfig) -> DesiredState:
    """The state with the new workers of `config`, and still with those that leave."""
    after = applied(state, config)
    for goal in state.workers:
        if after.goal(goal.name) is None:
            after = after.with_goal(goal)
    return after


def _final(state: DesiredState, config: ClusterConfig, revision: int) -> DesiredState:
    """The state of `config`, which workers that it does not list leave."""
    return with_pools(replace(state, drain_seconds=config.drain_seconds), config).settled(revision)

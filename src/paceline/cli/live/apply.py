"""`paceline apply`: makes a running cluster what its file says, after a plan."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.doctor.start_check import check_before_start
from paceline.cli.live.chosen_cluster import FILE, Ray, cluster_of
from paceline.cli.live.rollout import replace_workers
from paceline.cli.live.running import ModelChange, RunningCluster, Surge, Wait, finish, is_settled, wait_until
from paceline.cli.render import console
from paceline.cluster.scaling.changes import ChangePlan, applied, plan, with_pools
from paceline.cluster.scaling.desired import DesiredState
from paceline.core.cluster_config import ClusterConfig

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
        wait_until(lambda: is_settled(gateway, pools.desired()), wait)
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

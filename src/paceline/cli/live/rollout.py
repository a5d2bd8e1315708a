"""`paceline rollout`: replaces the workers of a cluster one at a time."""

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.doctor.start_check import check_before_start
from paceline.cli.live.chosen_cluster import Ray, running_config
from paceline.cli.live.running import (
    Config,
    DrainSeconds,
    ModelChange,
    RunningCluster,
    Surge,
    Wait,
    finish,
    with_drain_seconds,
)  # fmt: skip
from paceline.cli.render import console
from paceline.cluster.scaling.rollout import RolloutRule
from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import InvalidConfig

if TYPE_CHECKING:
    from paceline.runtime.deploy.rollout import LivePools
    from paceline.runtime.gateway_client.target_pool import TargetPool


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
    from paceline.runtime.deploy.rollout import RolloutRun

    state = pools.desired()
    role = next(pool.role for pool in config.pools if pool.name == name)
    rule = RolloutRule(
        wait,
        state.drain_seconds,
        surge=len(state.of_pool(name)) == 1 and role == "target" if surge is None else surge,
        compares=role != "draft",
    )
    run = RolloutRun(pools, gateway, lambda line: console.err.print(line, markup=False, soft_wrap=True))
    if failure := run.run(name, revision, rule, is_model_change):
        pools.edit(lambda state: state.without_revision(revision))
        console.fail(f"rolled back: {failure}")
        raise typer.Exit(1)

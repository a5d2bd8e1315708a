"""`paceline scale` and `paceline drain`: the number of workers in a pool, and the end of one worker."""

from dataclasses import replace
from typing import Annotated

import typer

from paceline.cli.doctor.start_check import check_before_start
from paceline.cli.live.chosen_cluster import Ray, running_config
from paceline.cli.live.running import (
    Config,
    DrainSeconds,
    RunningCluster,
    Wait,
    finish,
    with_drain_seconds,
)
from paceline.cluster.scaling.changes import resized
from paceline.cluster.scaling.desired import DesiredState
from paceline.core.cluster_config import ClusterConfig


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

"""`paceline scale` and `paceline drain`: the number of workers in a pool, and the end of one worker."""

from typing import Annotated

import typer

from paceline.cli.live.chosen_cluster import Ray, running_config
from paceline.cli.live.running import (
    Config,
    DrainSeconds,
    RunningCluster,
    Wait,
    finish,
    with_drain_seconds,
)
from paceline.cluster.scaling.changes import check_memory
from paceline.cluster.scaling.desired import DesiredState


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
            after = with_drain_seconds(state.scaled(pool, count), settings, drain_seconds)
            check_memory(state, after)
            return after

        pools.edit(change)
        finish(gateway, pools, wait)


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

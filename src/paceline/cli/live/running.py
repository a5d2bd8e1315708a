"""What the commands on live pools share: options, the running cluster, and the wait until it is as desired."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.render import console
from paceline.cli.render.workers import view
from paceline.cluster.scaling.desired import DesiredState
from paceline.core.cluster_config import ClusterConfig

if TYPE_CHECKING:
    from paceline.runtime.deploy.rollout import LivePools
    from paceline.runtime.gateway_client.target_pool import TargetPool

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
        with console.err.status("reading the cluster"):
            from paceline.runtime.deploy.deployment import live_pools, observe_cluster

            pools = live_pools(self._config)
            self._observed = observe_cluster(self._config)
            return pools, self._observed.__enter__()

    def __exit__(self, *error: object) -> None:
        self._observed.__exit__(None, None, None)


def with_drain_seconds(state: DesiredState, config: ClusterConfig, seconds: float | None) -> DesiredState:
    return replace(state, drain_seconds=config.drain_seconds if seconds is None else seconds)


def is_settled(gateway: "TargetPool", state: DesiredState) -> bool:
    """Whether every desired worker is ready, or on trial, and every other worker is gone."""
    rows = {row.name: row.state for row in gateway.workers()}
    ready = all(rows.get(goal.name) == "ready" for goal in state.workers)
    return ready and all(row == "gone" or state.goal(name) is not None for name, row in rows.items())


def wait_until(is_done: Callable[[], bool], seconds: float) -> bool:
    with console.err.status("waiting for the workers"):
        deadline = time.monotonic() + seconds
        while not is_done():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL)
    return True


def finish(gateway: "TargetPool", pools: "LivePools", seconds: float) -> None:
    """Wait until the workers are as desired, and print them."""
    is_done = wait_until(lambda: is_settled(gateway, pools.desired()), seconds)
    console.out.print(view(gateway.workers()))
    if not is_done:
        console.fail(f"the workers were not as desired within {seconds:g} s")
        raise typer.Exit(1)

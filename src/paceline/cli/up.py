"""`paceline up`: start a cluster's workers and leave them running."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console
from paceline.cli.status import all_ready, view
from paceline.core.cluster_config import ClusterConfig
from paceline.runtime.cluster_file import load_cluster

Ray = Annotated[
    str | None,
    typer.Option(metavar="auto|ADDRESS", help="Run the workers on this Ray cluster; `ray` in the file says the same."),
]


def up(
    file: Annotated[Path, typer.Argument(metavar="CLUSTER.yaml", help="Pools, and where they run.")],
    ray: Ray = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait until all workers are ready.")] = 600.0,
) -> None:
    """Start the workers of a cluster as processes of this machine, or on Ray, and leave them running.

    Then `paceline serve --config CLUSTER.yaml` is a gateway for them, and may be restarted at any time. Status 1: some worker
    was not ready in time.
    """
    config = cluster_of(file, ray)
    with console.err.status(f"starting {config.name}"):
        from paceline.runtime import deployment

        if config.ray is not None:
            from paceline.runtime.ray_deployment import RayDeployment

            RayDeployment.up(config)
        else:
            folder = deployment.up(file, config)
        with deployment.observed(config) as pool:
            ready = all_ready(pool, wait)
            workers = pool.workers()
    console.out.print(view(workers))
    if config.ray is None:
        console.err.print(f"logs: {folder.logs}")
    if not ready:
        console.fail(f"not every worker was ready within {wait:g} s")
        raise typer.Exit(1)


def cluster_of(file: Path, ray: str | None) -> ClusterConfig:
    config = load_cluster(file)
    return config if ray is None else replace(config, ray=ray)

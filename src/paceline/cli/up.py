"""`paceline up`: start a cluster's workers and leave them running."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console
from paceline.cli.status import all_ready, view
from paceline.core.cluster_config import ClusterConfig
from paceline.runtime.deploy.cluster_file import load_cluster

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
        from paceline.runtime.deploy import deployment
        from paceline.runtime.deploy.state import StateFolder

        said = Warnings(StateFolder.of(config).logs / "supervisor.log")
        if config.ray is not None:
            from paceline.runtime.deploy.ray_deployment import RayDeployment

            RayDeployment.up(config)
        else:
            folder = deployment.up(file, config)
        with deployment.observed(config) as pool:
            try:
                ready = all_ready(pool, wait, said)
            except KeyboardInterrupt:
                console.err.print(
                    f"the workers start all the same; `paceline down {file}` stops them", markup=False, soft_wrap=True
                )
                raise
            workers = pool.workers()
    console.out.print(view(workers))
    if config.ray is None:
        console.err.print(f"logs: {folder.logs}")
    if not ready:
        short = (
            ""
            if config.ray is None
            else "; `ray status` says whether resources are short, `ray logs` what the workers say"
        )
        console.fail(f"not every worker was ready within {wait:g} s{short}")
        raise typer.Exit(1)


class Warnings:
    """Prints what a log complains of from now on: a worker that cannot start is not waited for in silence."""

    def __init__(self, log: Path) -> None:
        self._log, self._at = log, log.stat().st_size if log.exists() else 0

    def __call__(self) -> None:
        if not self._log.exists():
            return
        with self._log.open("rb") as log:
            log.seek(self._at)
            lines = [line for line in log.readlines() if line.endswith(b"\n")]
        self._at += sum(map(len, lines))
        for record in map(json.loads, filter(lambda line: line.startswith(b"{"), lines)):
            if record["level"] != "info":
                console.err.print(record["message"], style="yellow", markup=False, soft_wrap=True)


def cluster_of(file: Path, ray: str | None) -> ClusterConfig:
    config = load_cluster(file)
    return config if ray is None else replace(config, ray=ray)

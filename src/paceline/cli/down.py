"""`paceline down`: stop a cluster's workers."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console
from paceline.cli.up import Ray, cluster_of


def down(file: Annotated[Path, typer.Argument(metavar="CLUSTER.yaml")], ray: Ray = None) -> None:
    """Stop a cluster's workers, whether `paceline up` or `paceline serve` started them, which then ends too.

    Status 1: there were none.
    """
    config = cluster_of(file, ray)
    with console.err.status(f"stopping {config.name}"):
        from paceline.runtime.deploy.deployment import down as stop

        stopped = stop(config)
    console.out.print(f"{config.name} is down" if stopped else f"{config.name} was not up")
    if not stopped:
        raise typer.Exit(1)

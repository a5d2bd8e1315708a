"""The cluster that a command works on: a file, `cluster.yaml` in this folder, or the one that runs on this machine."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.render import console
from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import InvalidConfig
from paceline.runtime.deploy.cluster_file import load_cluster

FILE = Path("cluster.yaml")
CONFIG_OPTION = "--config CLUSTER.yaml"

Ray = Annotated[
    str | None,
    typer.Option(metavar="auto|ADDRESS", help="Run the workers on this Ray cluster; same as `ray` in the file."),
]


def cluster_of(file: Path, ray: str | None) -> ClusterConfig:
    """Settings of the file. `ray` replaces its address of a Ray cluster."""
    if file == FILE and not file.exists():
        raise InvalidConfig(f"there is no {FILE} in this folder: give the file of the cluster")
    config = load_cluster(file)
    return config if ray is None else replace(config, ray=ray)


def running_config(file: Path | None, ray: str | None, option: str = CONFIG_OPTION) -> ClusterConfig:
    """Settings of the cluster to change: of the file, or of `cluster.yaml` in this folder, or those that the only cluster of
    this machine runs with. `option` is the form in which the command takes a file."""
    if file is not None or FILE.exists():
        return cluster_of(file or FILE, ray)
    if ray is not None:
        raise InvalidConfig(f"with --ray, give the file that the cluster was started with: {option}")
    from paceline.runtime.deploy.state import StateFolder  # part of the extra `pool`

    running = StateFolder.running()
    if not running:
        raise InvalidConfig(
            f"no cluster found: give the file that it was started with, {option}, or start one with "
            "`paceline up CLUSTER.yaml`"
        )
    if len(running) > 1:
        names = ", ".join(folder.path.name for folder in running)
        raise InvalidConfig(f"{len(running)} clusters run here ({names}): give the file of one, {option}")
    config = running[0].desired().config
    console.err.print(f"cluster {config.name}, found in {running[0].path}", style="dim", markup=False, soft_wrap=True)
    return config


def has_default() -> bool:
    """Whether `running_config` finds something without a file: `cluster.yaml` in this folder, or clusters that run here."""
    from paceline.runtime.deploy.state import StateFolder  # part of the extra `pool`

    return FILE.exists() or bool(StateFolder.running())

"""`paceline up`, `down` and `keys`: the workers of a cluster."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import console
from paceline.cli.workers import FILE, Ray, check_before_start, cluster_of, running_config, state_of, view

if TYPE_CHECKING:
    from paceline.targets import TargetPool


def up(
    file: Annotated[Path, typer.Argument(metavar="CLUSTER.yaml", help="The cluster's pools and machines.")] = FILE,
    ray: Ray = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait until all workers are ready.")] = 600.0,
) -> None:
    """Start the workers of a cluster as processes of this machine, or on Ray, and leave them running.

    First the cluster is checked as `paceline doctor CLUSTER.yaml` does; nothing starts if there is a problem.

    `paceline serve --config CLUSTER.yaml` then starts a gateway for them, which can be restarted at any time. Exit status 1:
    some worker was not ready in time.
    """
    config = cluster_of(file, ray)
    check_before_start(config)
    with console.waiting(f"starting {config.name}") as show:
        from paceline.deploy import observe_cluster, up
        from paceline.deploy.processes import StateFolder

        warnings = LogWarnings(StateFolder.of(config).logs / "supervisor.log")
        if config.ray is not None:
            from paceline.deploy.ray import RayDeployment

            RayDeployment.up(config)
        else:
            folder = up(file, config)
        with observe_cluster(config) as pool:
            try:
                ready = all_ready(pool, wait, show, warnings)
            except KeyboardInterrupt:
                console.err.print(
                    f"the workers continue to start; `paceline down {file}` stops them", markup=False, soft_wrap=True
                )
                raise
            workers = pool.workers()
    console.out.print(view(workers))
    if config.ray is None:
        console.err.print(f"logs: {folder.logs}")
    if not ready:
        short = "" if config.ray is None else "; `ray status` shows missing resources, `ray logs` the workers' logs"
        console.fail(f"not every worker was ready within {wait:g} s{short}")
        raise typer.Exit(1)


class LogWarnings:
    """Prints warnings and errors added to a log since the last call, so that a failing start is visible."""

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


def down(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="CLUSTER.yaml",
            help="The file that the cluster was started with. Default: ./cluster.yaml, or else the one cluster that runs here.",
        ),
    ] = None,
    ray: Ray = None,
) -> None:
    """Stop a cluster's workers. A `paceline serve` that started them ends too.

    Exit status 1: no workers were running.
    """
    config = running_config(file, ray, "`paceline down CLUSTER.yaml`")
    with console.waiting(f"stopping {config.name}"):
        from paceline.deploy import down as stop

        stopped = stop(config)
    console.out.print(f"{config.name} is down" if stopped else f"{config.name} was not up")
    if not stopped:
        raise typer.Exit(1)


def all_ready(
    pool: "TargetPool", seconds: float, show: Callable[[str], None], meanwhile: Callable[[], None] = lambda: None
) -> bool:
    """Whether every worker is ready, with a measured round trip, within `seconds`. `show` gets those that are not ready yet."""
    deadline = time.monotonic() + seconds
    while True:
        workers = [worker for worker in pool.workers() if worker.state != "gone"]
        is_ready = bool(workers) and all(worker.state == "ready" for worker in workers)
        if is_ready and all(worker.round_trip is not None for worker in workers if worker.role != "draft"):
            return True
        # A refused draft does not become ready
        is_settled = all(worker.state in ("ready", "refused") for worker in workers)
        if time.monotonic() >= deadline or (workers and is_settled and not is_ready):
            return is_ready
        show(
            ", ".join(map(state_of, (worker for worker in workers if worker.state != "ready")))
            or "measuring round trips"
        )
        meanwhile()
        time.sleep(0.1)


def keys(folder: Annotated[Path, typer.Argument(help="Output folder; the value of `keys` in cluster.yaml.")]) -> None:
    """Create the CURVE keys of a cluster: a pair each for gateways, targets and drafts.

    Workers encrypt connections and reject all other clients. Each machine needs the .key_secret files of the roles it runs and
    all .key files. Public .key files of further clients go into the folder `allowed`.
    """
    from paceline.wire.keys import KeyFolder

    created = KeyFolder.create(folder)
    console.out.print(
        f"created keys for gateway, target and draft in {created.path}; in cluster.yaml:\n\nkeys: {created.path.resolve()}"
    )

"""`paceline up`, `down`, `status` and `keys`: the workers of a cluster."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.cli.render import console
from paceline.cluster.cost.spending import cost_since_start, dollars_per_hour
from paceline.core.cluster_config import ClusterConfig
from paceline.core.worker_status import WorkerStatus
from paceline.runtime.deploy.cluster_file import load_cluster

if TYPE_CHECKING:
    from paceline.runtime.gateway_client.target_pool import TargetPool


Ray = Annotated[
    str | None,
    typer.Option(metavar="auto|ADDRESS", help="Run the workers on this Ray cluster; same as `ray` in the file."),
]


def up(
    file: Annotated[Path, typer.Argument(metavar="CLUSTER.yaml", help="The cluster's pools and machines.")],
    ray: Ray = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait until all workers are ready.")] = 600.0,
) -> None:
    """Start the workers of a cluster as processes of this machine, or on Ray, and leave them running.

    First the cluster is checked as `paceline doctor CLUSTER.yaml` does; nothing starts if there is a problem.

    `paceline serve --config CLUSTER.yaml` then starts a gateway for them, which can be restarted at any time. Exit status 1:
    some worker was not ready in time.
    """
    config = cluster_of(file, ray)
    with console.err.status(f"checking {config.name}"):
        from paceline.cli.doctor.cluster_checks import require_sound

        require_sound(config)
    with console.err.status(f"starting {config.name}"):
        from paceline.runtime.deploy import deployment
        from paceline.runtime.deploy.state import StateFolder

        warnings = LogWarnings(StateFolder.of(config).logs / "supervisor.log")
        if config.ray is not None:
            from paceline.runtime.deploy.on_ray.deployment import RayDeployment

            RayDeployment.up(config)
        else:
            folder = deployment.up(file, config)
        with deployment.observe_cluster(config) as pool:
            try:
                ready = all_ready(pool, wait, warnings)
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


def cluster_of(file: Path, ray: str | None) -> ClusterConfig:
    config = load_cluster(file)
    return config if ray is None else replace(config, ray=ray)


def down(file: Annotated[Path, typer.Argument(metavar="CLUSTER.yaml")], ray: Ray = None) -> None:
    """Stop a cluster's workers. A `paceline serve` that started them ends too.

    Exit status 1: no workers were running.
    """
    config = cluster_of(file, ray)
    with console.err.status(f"stopping {config.name}"):
        from paceline.runtime.deploy.deployment import down as stop

        stopped = stop(config)
    console.out.print(f"{config.name} is down" if stopped else f"{config.name} was not up")
    if not stopped:
        raise typer.Exit(1)


STYLES = {
    "ready": "green",
    "joining": "yellow",
    "draining": "yellow",
    "gone": "dim",
    "suspected": "bold red",
    "unhealthy": "bold red",
    "refused": "bold red",
}
REFRESH = 0.5
STATUS_TIMEOUT = 5.0
"""Seconds to wait for the workers' heartbeats."""


def status(
    file: Annotated[Path, typer.Argument(metavar="CLUSTER.yaml")],
    ray: Annotated[
        str | None, typer.Option(metavar="auto|ADDRESS", help="The Ray cluster that runs the workers.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object and stop.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print one table and stop; the default when piped.")] = False,
) -> None:
    """Show the workers of a cluster: state, queue, depth, alpha, round trip, hits of drafting ahead, and symptoms.

    Exit status 1: some worker is not ready.
    """
    config = load_cluster(file)
    config = config if ray is None else replace(config, ray=ray)
    with console.err.status("waiting for heartbeats"):
        from paceline.runtime.deploy.deployment import observe_cluster
    with observe_cluster(config) as pool:
        ready = all_ready(pool, STATUS_TIMEOUT)
        if json_output:
            workers = pool.workers()
            document = {
                "cluster": config.name,
                "workers": [asdict(worker) for worker in workers],
                "dollars_per_hour": dollars_per_hour(workers),
                "dollars_per_million_tokens": cost_since_start(workers, time.time()),
            }
            sys.stdout.write(json.dumps(document, indent=2) + "\n")
        elif once or not sys.stdout.isatty():
            console.out.print(view(pool.workers()))
        else:
            _watch(pool)
            return
    if not ready:
        raise typer.Exit(1)


def all_ready(pool: "TargetPool", seconds: float, meanwhile: Callable[[], None] = lambda: None) -> bool:
    """Whether every worker is ready, with a measured round trip, within `seconds`."""
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
        meanwhile()
        time.sleep(0.1)


def view(workers: Sequence[WorkerStatus]) -> Group:
    """A table of the workers, and one line per symptom and per worker that has exited below it."""
    lines = [
        Text(
            f"! {worker.name}: restarted {worker.life.restarts}x, up {_uptime(worker)}, last exit: {worker.life.last_exit}",
            "yellow",
        )
        for worker in workers
        if worker.life.last_exit
    ]
    started = [worker for worker in workers if worker.life.started is not None and worker.state != "gone"]
    times = [f"{worker.name} {_uptime(worker)}" for worker in started]
    if times:
        lines.insert(0, Text(f"up: {', '.join(times)}", "dim"))
    price = dollars_per_hour(workers)
    if price is not None:
        lines.append(Text(f"cost: {_cost(price, cost_since_start(workers, time.time()))}", "dim"))
    lines += [Text(f"! {worker.name} is refused: {worker.refusal}", "bold red") for worker in workers if worker.refusal]
    lines += [
        Text(f"! {worker.name}: {one.name}, {one.figure:.3g} against {one.limit:.3g}; {one.remedy}", "yellow")
        for worker in workers
        for one in worker.symptoms
    ]
    return Group(_table(workers), *lines)


def _cost(price: float, per_million: float | None) -> str:
    """Such as `$5.38 an hour, $0.42 per million tokens since the start`."""
    each = "no tokens yet" if per_million is None else f"${per_million:,.4g} per million tokens since the start"
    return f"${price:,.2f} an hour, {each}"


def _table(workers: Sequence[WorkerStatus]) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    handoffs = ["handed"] if any(worker.handoffs for worker in workers) else []
    for name in (
        "worker",
        "role",
        "state",
        "run",
        "wait",
        "cache",
        "depth",
        "alpha",
        "trip",
        "hits",
        "late",
        *handoffs,
    ):
        if name == "state":  # may be long: it wraps before a number is cut
            table.add_column(name, min_width=max(map(len, STYLES)))
        else:
            table.add_column(name, justify="left" if name in ("worker", "role") else "right", no_wrap=True)
    for worker in workers:
        table.add_row(
            worker.name,
            worker.role,
            Text(worker.state, STYLES.get(worker.state, "yellow")),
            str(worker.running),
            str(worker.waiting) if worker.queue_seconds is None else f"{1e3 * worker.queue_seconds:.1f} ms",
            _shown(worker.kv_use, "{:.0%}"),
            _shown(worker.depth, "{:.1f}"),
            _shown(worker.alpha, "{:.2f}"),
            "-" if worker.round_trip is None else f"{1e3 * worker.round_trip:.2f} ms",
            _hits(worker),
            f"{worker.late / worker.answers:.0%}" if worker.answers else "-",
            *(_handoffs(worker) for _ in handoffs),
        )
    return table


def _uptime(worker: WorkerStatus) -> str:
    """Time since the last start, such as `5 m`, `3 h` or `2 d`."""
    if worker.life.started is None:
        return "-"
    seconds = max(0.0, time.time() - worker.life.started)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _hits(worker: WorkerStatus) -> str:
    if worker.paused_share is not None:
        return f"off: {worker.paused_share:.0%}"
    return f"{worker.hits / worker.answers:.0%}" if worker.answers else "-"


def _handoffs(worker: WorkerStatus) -> str:
    counts = worker.handoffs
    if counts is None:
        return "-"
    return f"{counts.done} ({counts.failed} failed)" if counts.failed else str(counts.done)


def _shown(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def _watch(pool: "TargetPool") -> None:
    try:
        with Live(view(pool.workers()), console=console.out, auto_refresh=False) as live:
            while True:
                time.sleep(REFRESH)
                live.update(view(pool.workers()), refresh=True)
    except KeyboardInterrupt:
        pass


def keys(folder: Annotated[Path, typer.Argument(help="Output folder; the value of `keys` in cluster.yaml.")]) -> None:
    """Create the CURVE keys of a cluster: a pair each for gateways, targets and drafts.

    Workers encrypt connections and reject all other clients. Each machine needs the .key_secret files of the roles it runs and
    all .key files. Public .key files of further clients go into the folder `allowed`.
    """
    from paceline.runtime.wire.keys import KeyFolder

    created = KeyFolder.create(folder)
    console.out.print(
        f"created keys for gateway, target and draft in {created.path}; in cluster.yaml:\n\nkeys: {created.path.resolve()}"
    )

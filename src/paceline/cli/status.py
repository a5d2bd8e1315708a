"""`paceline status`: a cluster's workers, live."""

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

from paceline.cli import console
from paceline.core.worker_status import WorkerStatus
from paceline.runtime.deploy.cluster_file import load_cluster

if TYPE_CHECKING:
    from paceline.runtime.gateway_client.target_pool import TargetPool

STYLES = {"ready": "green", "starting": "yellow", "suspected": "bold red", "unhealthy": "bold red"}
REFRESH = 0.5
PATIENCE = 5.0
"""Seconds for the workers to say how they are."""


def status(
    file: Annotated[Path, typer.Argument(metavar="CLUSTER.yaml")],
    ray: Annotated[
        str | None, typer.Option(metavar="auto|ADDRESS", help="The Ray cluster that runs the workers.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object and stop.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print one table and stop; so it does when piped.")] = False,
) -> None:
    """Show the workers of a cluster: state, queue, depth, alpha, round trip, pre-speculation hits, and what is wrong.

    Status 1: some worker is not ready.
    """
    config = load_cluster(file)
    config = config if ray is None else replace(config, ray=ray)
    with console.err.status("asking the workers"):
        from paceline.runtime.deploy.deployment import observed
    with observed(config) as pool:
        ready = all_ready(pool, PATIENCE)
        if json_output:
            document = {"cluster": config.name, "workers": [asdict(worker) for worker in pool.workers()]}
            sys.stdout.write(json.dumps(document, indent=2) + "\n")
        elif once or not sys.stdout.isatty():
            console.out.print(view(pool.workers()))
        else:
            _watch(pool)
            return
    if not ready:
        raise typer.Exit(1)


def all_ready(pool: "TargetPool", seconds: float, meanwhile: Callable[[], None] = lambda: None) -> bool:
    """Whether every worker is, and was heard often enough to say how far it is away, within that time."""
    deadline = time.monotonic() + seconds
    while True:
        workers = pool.workers()
        is_ready = bool(workers) and all(worker.state == "ready" for worker in workers)
        if is_ready and all(worker.round_trip is not None for worker in workers if worker.role != "draft"):
            return True
        if time.monotonic() >= deadline:
            return is_ready
        meanwhile()
        time.sleep(0.1)


def view(workers: Sequence[WorkerStatus]) -> Group:
    """The table, and what is wrong below it."""
    lines = [
        Text(f"! {worker.name}: {one.name}, {one.figure:.3g} against {one.limit:.3g}; {one.remedy}", "yellow")
        for worker in workers
        for one in worker.symptoms
    ]
    return Group(_table(workers), *lines)


def _table(workers: Sequence[WorkerStatus]) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    handed = ["handed"] if any(worker.handoffs for worker in workers) else []
    for name in ("worker", "role", "state", "run", "wait", "cache", "depth", "alpha", "trip", "hits", "late", *handed):
        if name == "state":  # may be long: it wraps before a figure is cut
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
            *(_handed(worker) for _ in handed),
        )
    return table


def _hits(worker: WorkerStatus) -> str:
    if worker.resting is not None:
        return f"off: {worker.resting:.0%}"
    return f"{worker.hits / worker.answers:.0%}" if worker.answers else "-"


def _handed(worker: WorkerStatus) -> str:
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

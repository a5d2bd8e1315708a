"""The table of `paceline status`, and the cluster that a command works on.

The table lists the workers of a cluster or a server. The cluster is a file, `cluster.yaml` in this folder, or the one that runs
on this machine. `check_before_start` checks a cluster before a command starts workers.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from paceline.cli import console
from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import InvalidConfig, PacelineError
from paceline.core.status import WorkerStatus
from paceline.deploy.processes import load_cluster
from paceline.policy.cost.cost import cost_since_start, dollars_per_hour

STYLES = {
    "ready": "green",
    "joining": "yellow",
    "draining": "yellow",
    "gone": "dim",
    "suspected": "bold red",
    "unhealthy": "bold red",
    "refused": "bold red",
}


def view(workers: Sequence[WorkerStatus]) -> Group:
    """A table of the workers. Below it are one line per symptom, and one per worker that has exited and is not ready again."""
    lines = [
        Text(
            f"! {worker.name}: restarted {worker.life.restarts}x, up {_uptime(worker)}, last exit: {worker.life.last_exit}",
            "yellow",
        )
        for worker in workers
        if worker.life.last_exit and worker.state != "ready"
    ]
    started = [worker for worker in workers if worker.life.started is not None and worker.state != "gone"]
    times = [f"{worker.name} {_uptime(worker)}{_restarts(worker)}" for worker in started]
    if times:
        lines.insert(0, Text(f"up: {', '.join(times)}", "dim"))
    price = dollars_per_hour(workers)
    if price is not None:
        lines.append(Text(f"cost: {_cost(price, cost_since_start(workers, time.time()))}", "dim"))
    lines += [Text(f"! {worker.name} is refused: {worker.refusal}", "bold red") for worker in workers if worker.refusal]
    lines += [
        Text(
            f"! {worker.name}: {symptom.name}, {symptom.figure:.3g} against {symptom.limit:.3g}; {symptom.remedy}",
            "yellow",
        )
        for worker in workers
        for symptom in worker.symptoms
    ]
    return Group(_table(workers), *lines)


def state_of(worker: WorkerStatus) -> str:
    """A worker and its state for a line of progress, such as `target-1 warming up`."""
    life = worker.life
    exits = f" (restarted {life.restarts}x, last exit: {life.last_exit})" if life.last_exit else ""
    return f"{worker.name} {worker.state}{exits}"


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
        "accept",
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
            _share(worker.accepted, worker.drafted),
            "-" if worker.round_trip is None else f"{1e3 * worker.round_trip:.2f} ms",
            _hits(worker),
            _share(worker.late, worker.answers),
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


def _restarts(worker: WorkerStatus) -> str:
    """How often a worker that is ready was restarted, such as ` (restarted 2x)`."""
    return f" (restarted {worker.life.restarts}x)" if worker.life.restarts and worker.state == "ready" else ""


def _hits(worker: WorkerStatus) -> str:
    if worker.paused_share is not None:
        return f"off: {worker.paused_share:.0%}"
    return _share(worker.hits, worker.answers)


def _handoffs(worker: WorkerStatus) -> str:
    counts = worker.handoffs
    if counts is None:
        return "-"
    notes = [f"{counts.failed} failed"] if counts.failed else []
    if counts.in_place_bytes:
        notes.append(f"{counts.in_place_bytes / counts.bytes:.0%} in place")
    return f"{counts.done} ({', '.join(notes)})" if notes else str(counts.done)


def _shown(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


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
    from paceline.deploy.processes import StateFolder  # part of the extra `pool`

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
    from paceline.deploy.processes import StateFolder  # part of the extra `pool`

    return FILE.exists() or bool(StateFolder.running())


UNSOUND = 2
"""Exit status of the process if the cluster has a problem."""


def check_before_start(config: ClusterConfig) -> None:
    """Raise `InvalidConfig` with every problem that `paceline doctor CLUSTER.yaml` finds. Another process looks for them: in
    this one that would leave torch, and on a GPU a CUDA context, in a gateway that runs for weeks."""
    import msgspec  # part of the extra `pool`

    command = [sys.executable, "-m", "paceline.cli.doctor_cluster"]
    with console.waiting(f"checking {config.name}"):
        result = subprocess.run(command, input=msgspec.json.encode(config), stdout=subprocess.PIPE, check=False)
    if result.returncode == UNSOUND:
        raise InvalidConfig(result.stdout.decode())
    if result.returncode:
        raise PacelineError(f"the check of the cluster ended with status {result.returncode}: run `paceline doctor`")

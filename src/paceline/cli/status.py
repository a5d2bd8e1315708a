"""`paceline status`: the workers of a cluster, or of a running server."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from paceline.cli import console
from paceline.cli.cluster import all_ready
from paceline.cli.workers import has_default, running_config, view
from paceline.core.cluster_config import ClusterConfig
from paceline.core.status import WorkerStatus
from paceline.gateway import ServerClient
from paceline.policy.cost.cost import cost_since_start, dollars_per_hour

SERVER = "http://127.0.0.1:8000"
REFRESH = 0.5
"""Seconds between two tables."""
HEARTBEAT_SECONDS = 5.0
"""Time for the heartbeats of a cluster's workers."""

Workers = Callable[[], Sequence[WorkerStatus]]


def status(
    place: Annotated[
        str | None,
        typer.Argument(
            metavar="CLUSTER.yaml|URL",
            help="A cluster, or the address of a server. Default: ./cluster.yaml, or else the one cluster that runs here, or "
            f"else {SERVER}.",
        ),
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="auto|ADDRESS", help="The Ray cluster that runs the workers.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="PACELINE_API_KEY", help="With a URL: a key with the scope `metrics`.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object and stop.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print one table and stop; the default when piped.")] = False,
) -> None:
    """Show workers: state, queue, depth, draft acceptance rate, round trip, hits of drafting ahead, and symptoms.

    Of a cluster, or of a running `paceline serve`. Exit status 1: some worker is not ready.
    """
    with _chosen(place, ray, api_key) as (name, is_ready, workers):
        if json_output:
            _print_json(name, workers())
        elif once or not sys.stdout.isatty():
            console.out.print(view(workers()))
        else:
            _watch(workers)
            return
    if not is_ready:
        raise typer.Exit(1)


def _chosen(
    place: str | None, ray: str | None, api_key: str | None
) -> AbstractContextManager[tuple[str, bool, Workers]]:
    """The cluster or the server to show."""
    if place is None and ray is None and not has_default():
        place = SERVER
    if place is not None and place.startswith(("http://", "https://")):
        return of_server(ServerClient(place, api_key))
    file = None if place is None else Path(place)
    return _of_cluster(running_config(file, ray, "`paceline status CLUSTER.yaml`"))


@contextmanager
def _of_cluster(config: ClusterConfig) -> Iterator[tuple[str, bool, Workers]]:
    """The name of a cluster, whether all its workers are ready, and a function that returns them."""
    with ExitStack() as stack:
        with console.waiting("waiting for heartbeats"):
            from paceline.deploy import observe_cluster

            pool = stack.enter_context(observe_cluster(config))
            is_ready = all_ready(pool, HEARTBEAT_SECONDS, lambda _: None)
        yield config.name, is_ready, pool.workers


@contextmanager
def of_server(server: ServerClient) -> Iterator[tuple[str, bool, Workers]]:
    """The same of a running server. Workers that several models share come once."""
    import msgspec  # part of the extra `server`

    def workers() -> list[WorkerStatus]:
        found: dict[str, WorkerStatus] = {}
        for model in server.get("/v1/paceline/overview")["models"]:
            report = server.get("/v1/paceline/overview", model=model, since=time.time())
            found |= {worker.name: worker for worker in msgspec.convert(report["workers"], list[WorkerStatus])}
        return list(found.values())

    yield server.url, all(worker.state in ("ready", "gone") for worker in workers()), workers


def _print_json(name: str, workers: Sequence[WorkerStatus]) -> None:
    document = {
        "cluster": name,
        "workers": [asdict(worker) for worker in workers],
        "dollars_per_hour": dollars_per_hour(workers),
        "dollars_per_million_tokens": cost_since_start(workers, time.time()),
    }
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def _watch(workers: Workers) -> None:
    try:
        with Live(view(workers()), console=console.out, auto_refresh=False) as live:
            while True:
                time.sleep(REFRESH)
                live.update(view(workers()), refresh=True)
    except KeyboardInterrupt:
        pass

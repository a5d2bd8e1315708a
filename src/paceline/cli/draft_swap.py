"""`paceline draft swap`: a new draft for a pool or for the engines of a server, tried under load."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import console
from paceline.cli.live import Config, RunningCluster, Wait, finish
from paceline.cli.workers import Ray, check_before_start, running_config
from paceline.core.errors import InvalidRequest
from paceline.gateway import ServerClient, ServerUnavailable

draft = typer.Typer(no_args_is_help=True)

PAUSE = 0.25
RETRY_SECONDS = 60.0
"""Time for which a server that does not answer is asked again."""


@dataclass(frozen=True, slots=True)
class DraftVerdict:
    is_kept: bool
    draft: str
    """The draft in use after the trial."""
    reason: str


class ServerDraft:
    """The draft inside a running server, over its routes `/admin/draft`."""

    def __init__(self, url: str, key: str | None, model: str | None = None) -> None:
        """`key` is an API key with the scope `admin`. `model` is needed if the server has several models."""
        self._server, self._model = ServerClient(url, key), model

    def swap(
        self, folder: str, seconds: float, period: float, wait: Callable[[], None], report: Callable[[str], None]
    ) -> DraftVerdict:
        """Try a draft until its verdict. `wait` pauses between two questions; an interruption ends the trial."""
        name = str(Path(folder).resolve()) if Path(folder).is_dir() else folder
        body = {"draft": name, "seconds": seconds, "period": period}
        state = self._call("POST", body | ({"model": self._model} if self._model else {}))
        try:
            while state["verdict"] == "continue":
                report(state["reason"])
                wait()
                state = self._read()
        except BaseException:
            self._call("DELETE")
            raise
        return DraftVerdict(state["verdict"] == "keep", state["draft"], state["reason"])

    def _read(self) -> dict[str, Any]:
        """The state. A server may restart its engine meanwhile."""
        deadline = time.monotonic() + RETRY_SECONDS
        while True:
            try:
                return self._call("GET")
            except ServerUnavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1.0)

    def _call(self, method: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        query = {"model": self._model} if self._model and body is None else {}
        state: dict[str, Any] = self._server.send(method, "/admin/draft", body, **query)
        return state


@draft.callback()
def group() -> None:
    """Change the drafts of a running cluster or server."""


@draft.command()
def swap(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="[POOL] FOLDER",
            help="A draft pool of the cluster (not with --server), and the new draft, as `model` of the pool or `draft`.",
        ),
    ],
    config: Config = None,
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Swap the draft inside the engines of this server instead of a draft pool."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="PACELINE_API_KEY", help="With --server: a key with the scope `admin`.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="With --server: the served model, if there are several.")] = None,
    period: Annotated[
        float, typer.Option(min=0.1, help="With --server: seconds of one draft before the other may follow.")
    ] = 4.0,
    seconds: Annotated[
        float, typer.Option(min=0, help="Longest time of the trial under load; 0: use the new draft at once.")
    ] = 600.0,
    wait: Wait = 600.0,
    ray: Ray = None,
) -> None:
    """Try a new draft under load, keep it if its goodput is higher with confidence, and roll back if it is not.

    In a pool, workers with the new draft start next to the other workers and get a quarter of the sequences. Inside a server,
    the engines alternate between both drafts every few seconds. The text does not change. Ctrl-C rolls back. Exit status 1: the
    old draft stays.
    """
    if len(names) != (1 if server else 2):
        raise InvalidRequest("give POOL and FOLDER, or --server URL and FOLDER alone", field="names")
    if server:
        _swap_in_server(ServerDraft(server, api_key, model), names[0], seconds, period)
    else:
        _swap_in_pool(names[0], names[1], config, seconds, wait, ray)


def _swap_in_server(server: ServerDraft, folder: str, seconds: float, period: float) -> None:
    with console.waiting("the new draft loads") as show:
        verdict = server.swap(folder, seconds, period, lambda: time.sleep(PAUSE), show)
    if verdict.is_kept:
        console.out.print(
            f"the server drafts with {verdict.draft}: {verdict.reason}; set `draft` to it for the next start",
            markup=False,
        )
    else:
        console.out.print(f"the server keeps {verdict.draft}: {verdict.reason}", markup=False)
        raise typer.Exit(1)


def _swap_in_pool(pool: str, model: str, config: Path | None, seconds: float, wait: float, ray: str | None) -> None:
    settings = running_config(config, ray)
    with RunningCluster(settings) as (pools, gateway):
        from paceline.deploy import DraftSwap, with_draft
        from paceline.policy.pairing.draft_trial import TrialLimits, TrialVerdict

        check_before_start(with_draft(pools.desired().config, pool, model))
        run = DraftSwap(pools, gateway, pool, model, TrialLimits(seconds=seconds))
        with console.waiting("the new draft loads") as show:

            def pause() -> bool:
                time.sleep(PAUSE)
                return True

            decision = run.run(pause, wait, show)
        is_kept = decision.verdict is TrialVerdict.KEEP
        finish(gateway, pools, wait)
    if is_kept:
        console.out.print(
            f"{pool} drafts with {model}: {decision.reason}; set `model: {model}` of the pool in "
            f"{config or 'the cluster file'}",
            markup=False,
        )
    else:
        console.out.print(f"{pool} keeps its draft: {decision.reason}", markup=False)
        raise typer.Exit(1)

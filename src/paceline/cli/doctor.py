"""`paceline doctor`: checks of the machine, the models, a cluster or a running server, with advice."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from paceline.cli import console
from paceline.cli.options import ENGINE, with_settings
from paceline.deploy.processes import load_cluster
from paceline.gateway.config import ServerConfig

if TYPE_CHECKING:
    from paceline.cli.doctor_checks import Check


MARKS = {"good": ("✓", "green"), "note": ("•", "yellow"), "problem": ("✗", "bold red")}
"""Mark and style of a check, by its verdict."""


@with_settings(ENGINE)
def doctor(
    config: ServerConfig,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="CLUSTER.yaml|HEAD", help="Check this cluster instead of one server, or this draft head."
        ),
    ] = None,
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="Check the workers of this running server instead.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="PACELINE_API_KEY", help="With --server: a key with the scope `metrics`.")
    ] = None,
) -> None:
    """Check that the models fit this machine and each other, and print what to change.

    Takes the same options or --config as serve, or a cluster file, which is checked as a whole: models, drafts, ranks, keys
    and memory by device. With the folder of a draft head, says what the head is, whether it fits --model, and what it costs.
    No weights are loaded. With --server, says what is wrong with the workers of a running server. Exit status 1: there is a
    problem.
    """
    if server is not None:
        _check_server(server, api_key)
        return
    with console.err.status("checking"):
        from paceline.cli.doctor_checks import CheckResult, check_machine, check_models
        from paceline.cli.doctor_cluster import check_cluster

        is_cluster = file is not None and file.suffix in (".yaml", ".yml")
        engine = config.engine if file is None else replace(config.engine, draft=str(file))
        found = check_cluster(load_cluster(file)) if file is not None and is_cluster else check_models(engine)
        checks = [*check_machine(), *found]
    console.out.print(_table(checks))
    problems = sum(check.verdict is CheckResult.PROBLEM for check in checks)
    if problems:
        console.out.print(f"{problems} problem{'s' if problems > 1 else ''}.", style="bold red")
        raise typer.Exit(1)
    ready = f"paceline up {file}" if is_cluster else "paceline serve, with the same options"
    ready += f" and --draft {file}" if file is not None and not is_cluster else ""
    console.out.print(f"Ready: {ready}", style="green", markup=False, soft_wrap=True)


def _check_server(url: str, api_key: str | None) -> None:
    from paceline.cli.doctor_checks import Check, CheckResult
    from paceline.cli.status import of_server
    from paceline.gateway import ServerClient

    checks = []
    with of_server(ServerClient(url, api_key)) as (_, _, workers):
        for worker in workers():
            found = f"{worker.state}; {worker.running} sequences run, {worker.waiting} wait"
            is_good = worker.state in ("ready", "gone")
            checks.append(Check(worker.name, found, CheckResult.GOOD if is_good else CheckResult.PROBLEM))
            checks += [
                Check.note(symptom.name, f"{symptom.figure:.4g}, limit {symptom.limit:.4g}", symptom.remedy)
                for symptom in worker.symptoms
            ]
    console.out.print(_table(checks))
    if any(check.verdict is CheckResult.PROBLEM for check in checks):
        raise typer.Exit(1)


def _table(checks: "Iterable[Check]") -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        found = Text(check.found)
        if check.advice:
            found.append(f"\n→ {check.advice}", style="yellow")
        table.add_row(Text(*MARKS[check.verdict.value]), check.name, found)
    return table

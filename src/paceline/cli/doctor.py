"""`paceline doctor`: the machine, the models, and what to change."""

from collections.abc import Iterable

import typer
from rich.table import Table
from rich.text import Text

from paceline.cli import console
from paceline.cli.check import Check, Verdict
from paceline.cli.options import ENGINE, with_settings
from paceline.server.config.config import ServerConfig

MARKS = {Verdict.GOOD: ("✓", "green"), Verdict.NOTE: ("•", "yellow"), Verdict.PROBLEM: ("✗", "bold red")}


@with_settings(ENGINE)
def doctor(config: ServerConfig) -> None:
    """Look at this machine and say whether the models fit, fit together, and what to change.

    Give the same options or the same --config as for serve. No weights are loaded. Status 1: there is a problem.
    """
    with console.err.status("looking around"):
        from paceline.cli.machine_checks import check_machine
        from paceline.cli.model_checks import check_models

        checks = [*check_machine(), *check_models(config.engine)]
    console.out.print(_table(checks))
    problems = sum(check.verdict is Verdict.PROBLEM for check in checks)
    if problems:
        console.out.print(f"{problems} problem{'s' if problems > 1 else ''}.", style="bold red")
        raise typer.Exit(1)
    console.out.print("Ready: paceline serve, with the same options", style="green")


def _table(checks: Iterable[Check]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        found = Text(check.found)
        if check.advice:
            found.append(f"\n→ {check.advice}", style="yellow")
        table.add_row(Text(*MARKS[check.verdict]), check.name, found)
    return table

"""`paceline doctor`: checks of the machine and the models, with advice."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer
from rich.table import Table
from rich.text import Text

from paceline.cli.options import ENGINE, with_settings
from paceline.cli.render import console
from paceline.server.config.config import ServerConfig

if TYPE_CHECKING:
    from paceline.cli.checks import Check


MARKS = {"good": ("✓", "green"), "note": ("•", "yellow"), "problem": ("✗", "bold red")}
"""Mark and style of a check, by its verdict."""


@with_settings(ENGINE)
def doctor(config: ServerConfig) -> None:
    """Check that the models fit this machine and each other, and print what to change.

    Takes the same options or --config as serve. No weights are loaded. Exit status 1: there is a problem.
    """
    with console.err.status("checking"):
        from paceline.cli.checks import Verdict, check_machine, check_models

        checks = [*check_machine(), *check_models(config.engine)]
    console.out.print(_table(checks))
    problems = sum(check.verdict is Verdict.PROBLEM for check in checks)
    if problems:
        console.out.print(f"{problems} problem{'s' if problems > 1 else ''}.", style="bold red")
        raise typer.Exit(1)
    console.out.print("Ready: paceline serve, with the same options", style="green")


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

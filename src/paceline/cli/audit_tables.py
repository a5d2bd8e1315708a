"""An audit on the terminal."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from paceline.audit.report import Report

SHOWN = 10


def print_report(report: "Report", console: Console) -> None:
    console.print(", ".join(f"{name} {value}" for name, value in report.about.items()), markup=False)
    console.print(_checks(report))
    for finding in report.findings[:SHOWN]:
        other = "" if finding.other is None else f", plain {finding.other}"
        console.print(
            f"{finding.kind}: prompt {finding.prompt}, output token {finding.index} ({finding.origin}): "
            f"{finding.token}{other}, {finding.figure:.3g}",
            style="red",
            markup=False,
        )
    if len(report.findings) > SHOWN:
        console.print(f"and {len(report.findings) - SHOWN:,} more", style="red")
    for line in report.power:
        console.print(line, style="dim", markup=False)
    drafts = f"{report.num_drafted:,} drafted tokens, {report.num_accepted:,} accepted"
    if report.is_clean:
        console.print(f"clean: {drafts}, and the text is plain decoding's", style="bold green")
    else:
        console.print(f"drift: {drafts}, and the text is not plain decoding's", style="bold red")


def _checks(report: "Report") -> Table:
    table = Table("check", title="Audit", title_justify="left")
    table.add_column("of", justify="right")
    table.add_column("wrong", justify="right")
    table.add_column("")
    for check in report.checks:
        wrong = Text(f"{check.num_wrong:,}", style="bold red" if check.num_wrong else "green")
        table.add_row(check.name, f"{check.num_checked:,} {check.unit}", wrong, check.detail)
    return table

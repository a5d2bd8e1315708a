"""Plans as terminal tables."""

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.cli.render.simulation import describe
from paceline.planning.simulation.objective import Objective
from paceline.planning.sizing.plan import Plan

PLACEMENTS = {"none": "-", "device": "target", "pool": "pool"}


def print_plan(plan: Plan, objective: Objective, explain: bool, console: Console) -> None:
    console.print(
        f"{plan.choice.report.trace}: {describe(objective)}, for {objective.share:.0%}", style="bold", markup=False
    )
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    headings = (
        "tar-\ngets",
        "draft\nworkers",
        "drafts\non",
        "$ an\nhour",
        "met",
        "TTFT p99\nms",
        "TPOT p99\nms",
        "busy",
        "$ per\nmillion",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    shown = plan.evaluations if explain else [one for one in (plan.choice, plan.plain) if one is not None]
    for one in dict.fromkeys(shown):
        report, candidate = one.report, one.candidate
        table.add_row(
            str(candidate.targets),
            str(candidate.drafts),
            PLACEMENTS[candidate.placement],
            f"{candidate.dollars_per_hour:.2f}",
            f"{one.attainment:.2%}",
            f"{1000.0 * report.ttft.p99:,.1f}",
            f"{1000.0 * report.tpot.p99:,.1f}",
            f"{report.utilisation:.0%}",
            f"{report.dollars_per_million:.2f}",
            style="bold green" if one == plan.choice and plan.is_met else "",
        )
    console.print(table)
    console.print()
    console.print(plan.reasons[0], style="bold green" if plan.is_met else "bold yellow", markup=False)
    for reason in plan.reasons[1:]:
        console.print(f"- {reason}", markup=False)

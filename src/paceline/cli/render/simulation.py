"""Reports of simulations, and plans, as terminal tables."""

import math

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.planning.simulation.config import SimulationConfig
from paceline.planning.simulation.objective import Objective
from paceline.planning.simulation.result import Quantiles, SimulationReport
from paceline.planning.sizing.plan import ClusterPlan

PLACEMENTS = {"none": "-", "device": "target", "pool": "pool"}


def print_simulation(
    report: SimulationReport, config: SimulationConfig, objective: Objective, console: Console
) -> None:
    console.print(title(report, config), style="bold", markup=False)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("ms", "mean", "p50", "p90", "p99"):
        table.add_column(heading, justify="right" if heading != "ms" else "left", no_wrap=True)
    table.add_row("TTFT", *milliseconds(report.ttft))
    table.add_row("TPOT", *milliseconds(report.tpot))
    console.print(table)
    console.print()
    for name, value in figures(report, objective):
        console.print(f"{name:<26}{value}", markup=False)
    assumed = dict.fromkeys(name.partition(".")[0] for name in config.profile.assumed())
    if assumed:
        console.print(f"Not measured in this profile: {', '.join(assumed)}.", style="dim", markup=False)


def title(report: SimulationReport, config: SimulationConfig) -> str:
    pools = ((config.prefill_workers, "prefill"), (config.draft_workers, "draft"))
    others = "".join(f", {count} {role} worker{'s' * (count > 1)}" for count, role in pools if count)
    return f"{report.trace}: {report.requests} requests on {config.workers} x {config.profile.name}{others}"


def figures(report: SimulationReport, objective: Objective) -> list[tuple[str, str]]:
    """Names and values of the remaining figures of a report."""
    found = [
        ("output tokens per second", f"{report.tokens_per_second:,.1f}"),
        ("prefix hit rate", f"{report.hit_rate:.1%}"),
        ("target utilisation", f"{report.utilisation:.1%}"),
        *_others(report),
        ("simulated time", f"{report.seconds:,.1f} s, {report.steps:,} steps"),
        ("cost", f"${report.dollars:,.2f}, ${report.dollars_per_million:,.2f} per million output tokens"),
    ]
    if math.isfinite(objective.ttft) or math.isfinite(objective.tpot):
        found.append(("requests in the objective", f"{report.attainment:.2%} ({describe(objective)})"))
    if report.rejected:
        found.append(("rejected", f"{report.rejected} requests are larger than the KV cache of a worker"))
    return found


def _others(report: SimulationReport) -> list[tuple[str, str]]:
    """Figures of prefill and draft workers, and of faults, where there are any."""
    found = []
    if report.prefill_utilisation:
        failed = f", {report.failed_handoffs} failed" if report.failed_handoffs else ""
        found.append(("prefill utilisation", f"{report.prefill_utilisation:.1%}, {report.handoffs} hand-offs{failed}"))
    if report.draft_utilisation:
        found.append(("draft utilisation", f"{report.draft_utilisation:.1%}"))
    if report.moved:
        found.append(("moved requests", f"{report.moved} continued on another worker"))
    return found


def describe(objective: Objective) -> str:
    limits = (("TTFT", objective.ttft), ("TPOT", objective.tpot))
    shown = [f"{name} at most {1000.0 * limit:g} ms" for name, limit in limits if math.isfinite(limit)]
    return ", ".join(shown) or "no limit"


def milliseconds(times: Quantiles) -> list[str]:
    return [f"{1000.0 * value:,.2f}" for value in (times.mean, times.p50, times.p90, times.p99)]


def print_plan(plan: ClusterPlan, objective: Objective, explain: bool, console: Console) -> None:
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
    shown = (
        plan.evaluations
        if explain
        else [evaluation for evaluation in (plan.choice, plan.plain) if evaluation is not None]
    )
    for evaluation in dict.fromkeys(shown):
        report, candidate = evaluation.report, evaluation.candidate
        table.add_row(
            str(candidate.targets),
            str(candidate.drafts),
            PLACEMENTS[candidate.placement],
            f"{candidate.dollars_per_hour:.2f}",
            f"{evaluation.attainment:.2%}",
            f"{1000.0 * report.ttft.p99:,.1f}",
            f"{1000.0 * report.tpot.p99:,.1f}",
            f"{report.utilisation:.0%}",
            f"{report.dollars_per_million:.2f}",
            style="bold green" if evaluation == plan.choice and plan.is_met else "",
        )
    console.print(table)
    console.print()
    console.print(plan.reasons[0], style="bold green" if plan.is_met else "bold yellow", markup=False)
    for reason in plan.reasons[1:]:
        console.print(f"- {reason}", markup=False)

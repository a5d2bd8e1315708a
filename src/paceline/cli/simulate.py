"""`paceline simulate`: a trace on a cluster that need not exist.

Reports of simulations, and plans, are terminal tables. The report of a simulation is also an HTML page.
"""

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from paceline.cli import console
from paceline.cli import planning_options as options
from paceline.cli.advise import STYLE
from paceline.cli.options import JsonFile, check_folders, check_plots, print_written, write_json
from paceline.core.cluster_config import RouterPolicy
from paceline.planning.planner import ClusterPlan
from paceline.planning.simulator import (
    Objective,
    Quantiles,
    SimulationReport,
    SimulationResult,
    quantile,
    simulate,
    summarize,
)
from paceline.planning.simulator.settings import FORMS, LINK, DepthRule, Mode, SimulationConfig, parse_fault
from paceline.planning.traces import TrafficPattern

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


MAX_WORKERS = 64
"""Workers that the page lists."""


def page(report: SimulationReport, result: SimulationResult, objective: Objective, png: bytes) -> str:
    """One HTML file without external resources: latencies, figures, workers, the profile, and the plots."""
    config = result.config
    heading, picture = escape(title(report, config)), base64.b64encode(png).decode("ascii")
    times = [("TTFT", *milliseconds(report.ttft)), ("TPOT", *milliseconds(report.tpot))]
    shown = result.workers[:MAX_WORKERS]
    workers = [
        (
            worker.name,
            f"{worker.seconds:,.0f}",
            f"{worker.busy_seconds / worker.seconds:.1%}" if worker.seconds else "-",
        )
        for worker in shown
    ]
    rest = len(result.workers) - len(shown)
    parts = [
        f"<h1>{heading}</h1>",
        f"<p>Objective: {escape(describe(objective))}. Seed {config.seed}, {config.mode}, router {config.router}.</p>",
        f'<img alt="distributions of latency, utilisation of workers" src="data:image/png;base64,{picture}">',
        _table(("ms", "mean", "p50", "p90", "p99"), times),
        _table(("figure", ""), figures(report, objective)),
    ]
    if config.faults:
        parts += ["<h2>Faults</h2>", _table(("fault", "start, s", "end, s"), _faults(config))]
    parts += ["<h2>Workers</h2>", _table(("worker", "paid, s", "in steps"), workers)]
    if rest > 0:
        parts.append(f"<p>{rest} more workers are not listed.</p>")
    parts += [
        "<h2>Profile</h2>",
        f"<p>{escape(config.profile.about)}</p>",
        _table(("figure", "value", "origin"), _profile(config)),
    ]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{heading}</title>\n'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _faults(config: SimulationConfig) -> list[tuple[str, str, str]]:
    rows = []
    for fault in config.faults:
        what = f"{type(fault).__name__}: "
        what += ", ".join(getattr(fault, "workers", ())) or f"factor {getattr(fault, 'factor', 1.0):g}"
        end = "restart" if fault.end is None else "never" if fault.end == float("inf") else f"{fault.end:g}"
        rows.append((what, f"{fault.start:g}", end))
    return rows


def _profile(config: SimulationConfig) -> list[tuple[str, str, str]]:
    profile = config.profile
    named = (
        ("price per hour, $", profile.price_per_hour),
        ("draft price per hour, $", profile.draft_price_per_hour),
        ("KV cache, tokens", profile.kv_tokens),
        ("sequences at once", profile.max_num_seqs),
        ("start, s", profile.start_seconds),
    )
    return [(name, f"{figure.value:g}", figure.origin) for name, figure in named]


CDF_POINTS = 100


@dataclass(frozen=True, slots=True)
class SimulationFiles:
    """A file that is None is not written."""

    json: Path | None
    plot: Path | None
    html: Path | None

    def check(self) -> None:
        """Raise `InvalidRequest` if the folder of a file does not exist, `MissingDependency` without matplotlib."""
        check_folders(self.json, self.plot, self.html)
        check_plots(self.plot, self.html)

    def write(self, report: SimulationReport, result: SimulationResult, objective: Objective) -> None:
        if self.json is not None:
            write_json(self.json, _to_json(report, result, objective))
        if self.plot is not None or self.html is not None:
            self._write_plots(report, result, objective)
        print_written(self.json, self.plot, self.html)

    def _write_plots(self, report: SimulationReport, result: SimulationResult, objective: Objective) -> None:
        from paceline.tools.plots import plot_simulation

        png = plot_simulation(result, objective)
        if self.plot is not None:
            self.plot.write_bytes(png)
        if self.html is not None:
            self.html.write_text(page(report, result, objective, png), "utf-8")


def _to_json(report: SimulationReport, result: SimulationResult, objective: Objective) -> dict[str, Any]:
    jobs = result.jobs
    return {
        **asdict(report),
        "objective": {key: value if value < float("inf") else None for key, value in asdict(objective).items()},
        "cluster": _cluster(result.config),
        "utilisation_by_worker": {
            worker.name: worker.busy_seconds / worker.seconds if worker.seconds else 0.0 for worker in result.workers
        },
        "ttft_cdf": _cdf([job.ttft for job in jobs]),
        "tpot_cdf": _cdf([job.tpot for job in jobs if job.output_tokens > 1]),
    }


def _cluster(config: SimulationConfig) -> dict[str, Any]:
    return {
        "profile": config.profile.name,
        "assumed": config.profile.assumed(),
        "workers": config.workers,
        "draft_workers": config.draft_workers,
        "prefill_workers": config.prefill_workers,
        "link": config.link,
        "faults": [asdict(fault) for fault in config.faults],
        "speculation": None if config.speculation is None else asdict(config.speculation),
        "router": config.router,
        "mode": config.mode,
        "streams": config.streams,
        "seed": config.seed,
        "price_per_hour": config.price_per_hour,
    }


def _cdf(values: list[float]) -> list[float]:
    """Seconds at the shares 0, 1/100, … 1."""
    ordered = sorted(values)
    return [quantile(ordered, i / CDF_POINTS) for i in range(CDF_POINTS + 1)] if ordered else []


Workers = Annotated[int, typer.Option(min=1, help="Target workers.")]
DraftWorkers = Annotated[int, typer.Option(min=0, help="Draft workers; 0: targets draft on their own device.")]
PrefillWorkers = Annotated[int, typer.Option(min=0, help="Workers that compute long prompts for targets.")]
Link = Annotated[str, typer.Option(metavar="KIND", help="Link of hand-offs, of those of the profile.")]
Rule = Annotated[
    DepthRule, typer.Option(help="Depth: the expected best, the production policy, or always the largest.")
]
Router = Annotated[RouterPolicy, typer.Option(help="Router of the gateway.")]
StepMode = Annotated[Mode, typer.Option(help="Steps between two events at once, or one by one.")]
Streams = Annotated[
    int | None, typer.Option(min=1, help="Requests in flight, in place of the arrival times of the trace.")
]
Faults = Annotated[
    list[str] | None,
    typer.Option(metavar="FAULT", help=f"{FORMS}; NAME as target-0. Can be given more than once."),
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", help="Plot the distributions of TTFT and TPOT.")
]
HtmlFile = Annotated[
    Path | None, typer.Option("--html", metavar="FILE.html", help="Write one page with tables and plots.")
]


def simulate_command(
    trace: options.TraceFile = None,
    profile: options.Profile = "h200-8b",
    workers: Workers = 1,
    draft_workers: DraftWorkers = 0,
    prefill_workers: PrefillWorkers = 0,
    link: Link = LINK,
    alpha: options.Alpha = None,
    alpha_spread: options.AlphaSpread = 0.0,
    max_depth: options.MaxDepth = 8,
    rule: Rule = "expected",
    router: Router = "kv_aware",
    mode: StepMode = "closed_form",
    streams: Streams = None,
    rate: options.Rate = 1.0,
    prompt_tokens: options.PromptTokens = 1000,
    output_tokens: options.OutputTokens = 200,
    spread: options.Spread = 0.5,
    prefix_tokens: options.PrefixTokens = 0,
    prefix_groups: options.PrefixGroups = 1,
    burst: options.Burst = 1.0,
    seconds: options.Seconds = None,
    scale: options.Scale = 1.0,
    seed: options.Seed = 0,
    ttft_ms: options.TtftMs = None,
    tpot_ms: options.TpotMs = None,
    price: options.Price = None,
    draft_price: options.DraftPrice = None,
    fault: Faults = None,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Simulate a trace on a cluster of workers with a measured profile.

    The router, the pairing of draft workers, the decisions of hand-offs and the depth policy are those of a real cluster. The
    time is virtual.
    """
    files = SimulationFiles(json_file, plot_file, html_file)
    files.check()  # before simulating
    traffic = TrafficPattern(rate, prompt_tokens, output_tokens, spread, prefix_tokens, prefix_groups, burst)
    speculation = options.read_speculation(alpha, max_depth, alpha_spread)
    config = SimulationConfig(
        profile=options.read_profile(profile, price, draft_price),
        workers=workers,
        draft_workers=draft_workers,
        speculation=None if speculation is None else replace(speculation, rule=rule),
        router=router,
        mode=mode,
        streams=streams,
        seed=seed,
        prefill_workers=prefill_workers,
        link=link,
        faults=tuple(map(parse_fault, fault or ())),
    )
    objective = options.read_objective(ttft_ms, tpot_ms, 0.99)
    requests = options.read_trace(trace, traffic, seconds, scale, seed)
    with console.err.status(f"simulating {len(requests.requests)} requests"):
        result = simulate(config, requests)
    report = summarize(result, objective)
    print_simulation(report, config, objective, console.out)
    if speculation is None:
        console.out.print(options.NO_ALPHA, style="dim")
    files.write(report, result, objective)

"""`paceline simulate`: a trace on a cluster that need not exist."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.planning import options
from paceline.cli.render import console
from paceline.cli.render.simulation import print_simulation
from paceline.cli.render.simulation_page import page
from paceline.core.cluster_config import RouterPolicy
from paceline.planning.simulation.config import LINK, DepthRule, Mode, SimulationConfig
from paceline.planning.simulation.faults import FORMS, parse_fault
from paceline.planning.simulation.objective import Objective
from paceline.planning.simulation.result import SimulationReport, SimulationResult, quantile, summarize
from paceline.planning.simulation.simulation import simulate
from paceline.planning.traces.synthetic import Traffic

CDF_POINTS = 100


def simulate_command(
    trace: options.TraceFile = None,
    profile: options.Profile = "h200-8b",
    workers: Annotated[int, typer.Option(min=1, help="Target workers.")] = 1,
    draft_workers: Annotated[int, typer.Option(min=0, help="Draft workers; 0: targets draft on their own device.")] = 0,
    prefill_workers: Annotated[int, typer.Option(min=0, help="Workers that compute long prompts for targets.")] = 0,
    link: Annotated[str, typer.Option(metavar="KIND", help="Link of hand-offs, of those of the profile.")] = LINK,
    alpha: options.Alpha = None,
    alpha_spread: options.AlphaSpread = 0.0,
    max_depth: options.MaxDepth = 8,
    rule: Annotated[
        DepthRule, typer.Option(help="Depth: the expected best, the production policy, or always the largest.")
    ] = "expected",
    router: Annotated[RouterPolicy, typer.Option(help="Router of the gateway.")] = "kv_aware",
    mode: Annotated[Mode, typer.Option(help="Steps between two events at once, or one by one.")] = "closed_form",
    streams: Annotated[
        int | None, typer.Option(min=1, help="Requests in flight, in place of the arrival times of the trace.")
    ] = None,
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
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="FAULT", help=f"{FORMS}; NAME as target-0. Can be given more than once."),
    ] = None,
    json_file: options.JsonFile = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Plot the distributions of TTFT and TPOT.")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE.html", help="Write one page with tables and plots.")
    ] = None,
) -> None:
    """Simulate a trace on a cluster of workers with a measured profile.

    The router, the pairing of draft workers, the decisions of hand-offs and the depth policy are those of a real cluster. The
    time is virtual.
    """
    options.check_folder(json_file, plot_file, html_file)
    traffic = Traffic(rate, prompt_tokens, output_tokens, spread, prefix_tokens, prefix_groups, burst)
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
    if json_file is not None:
        json_file.write_text(json.dumps(_to_json(report, result, objective), indent=2) + "\n", "utf-8")
    if plot_file is not None or html_file is not None:
        _write_plots(report, result, objective, plot_file, html_file)


def _write_plots(
    report: SimulationReport,
    result: SimulationResult,
    objective: Objective,
    plot_file: Path | None,
    html_file: Path | None,
) -> None:
    from paceline.bench.simulation_plots import plot_simulation

    png = plot_simulation(result, objective)
    if plot_file is not None:
        plot_file.write_bytes(png)
    if html_file is not None:
        html_file.write_text(page(report, result, objective, png), "utf-8")


def _to_json(report: SimulationReport, result: SimulationResult, objective: Objective) -> dict[str, Any]:
    config = result.config
    jobs = result.jobs
    return {
        **asdict(report),
        "objective": {key: value if value < float("inf") else None for key, value in asdict(objective).items()},
        "cluster": {
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
        },
        "utilisation_by_worker": {
            one.name: one.busy_seconds / one.seconds if one.seconds else 0.0 for one in result.workers
        },
        "ttft_cdf": _cdf([job.ttft for job in jobs]),
        "tpot_cdf": _cdf([job.tpot for job in jobs if job.output_tokens > 1]),
    }


def _cdf(values: list[float]) -> list[float]:
    """Seconds at the shares 0, 1/100, … 1."""
    ordered = sorted(values)
    return [quantile(ordered, i / CDF_POINTS) for i in range(CDF_POINTS + 1)] if ordered else []

"""`paceline plan`: how many workers of each role, and why."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.output_files import JsonFile, check_folders, check_plots, print_written, write_json
from paceline.cli.planning import options
from paceline.cli.render import console
from paceline.cli.render.simulation import print_plan
from paceline.planning.sizing.candidate import ClusterLimits
from paceline.planning.sizing.plan import ClusterPlan, plan
from paceline.planning.traces.synthetic import TrafficPattern


def plan_command(
    trace: options.TraceFile = None,
    profile: options.Profile = "h200-8b",
    alpha: options.Alpha = None,
    alpha_spread: options.AlphaSpread = 0.0,
    max_depth: options.MaxDepth = 8,
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
    ttft_ms: options.TtftMs = 1000.0,
    tpot_ms: options.TpotMs = 50.0,
    share: options.Share = 0.99,
    max_workers: Annotated[int, typer.Option(min=1, help="Most target and draft workers.")] = 64,
    max_dollars: Annotated[float | None, typer.Option(min=0.0, help="Most dollars per hour.")] = None,
    price: options.Price = None,
    draft_price: options.DraftPrice = None,
    explain: Annotated[bool, typer.Option("--explain", help="List every cluster that was simulated.")] = False,
    json_file: JsonFile = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Plot cost against time per token.")
    ] = None,
) -> None:
    """Find the cheapest cluster that meets an objective, by simulation, with the reason.

    Exit status 1: no cluster within the limits meets it.
    """
    check_folders(json_file, plot_file)
    check_plots(plot_file)
    traffic = TrafficPattern(rate, prompt_tokens, output_tokens, spread, prefix_tokens, prefix_groups, burst)
    objective = options.read_objective(ttft_ms, tpot_ms, share)
    limits = ClusterLimits(max_workers, math.inf if max_dollars is None else max_dollars)
    worker = options.read_profile(profile, price, draft_price)
    speculation = options.read_speculation(alpha, max_depth, alpha_spread)
    requests = options.read_trace(trace, traffic, seconds, scale, seed)
    with console.err.status("simulating") as status:
        found = plan(
            worker, requests, objective, limits, speculation, seed, lambda text: status.update(f"simulating {text}")
        )
    print_plan(found, objective, explain, console.out)
    if speculation is None:
        console.out.print(options.NO_ALPHA, style="dim")
    if json_file is not None:
        write_json(json_file, _to_json(found))
    if plot_file is not None:
        from paceline.bench.simulation_plots import plot_plan

        plot_plan(found, requests.name, plot_file)
    print_written(json_file, plot_file)
    if not found.is_met:
        raise typer.Exit(1)


def _to_json(found: ClusterPlan) -> dict[str, Any]:
    return {
        "is_met": found.is_met,
        "reasons": found.reasons,
        "saving_per_month": found.saving_per_month,
        "choice": asdict(found.choice),
        "plain": None if found.plain is None else asdict(found.plain),
        "evaluations": [asdict(evaluation) for evaluation in found.evaluations],
    }

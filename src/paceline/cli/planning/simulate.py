"""`paceline simulate`: a trace on a cluster that need not exist."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.output_files import JsonFile
from paceline.cli.planning import options
from paceline.cli.planning.simulation_files import SimulationFiles
from paceline.cli.render import console
from paceline.cli.render.simulation import print_simulation
from paceline.core.cluster_config import RouterPolicy
from paceline.planning.simulation.config import LINK, DepthRule, Mode, SimulationConfig
from paceline.planning.simulation.faults import FORMS, parse_fault
from paceline.planning.simulation.result import summarize
from paceline.planning.simulation.simulation import simulate
from paceline.planning.traces.synthetic import TrafficPattern

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

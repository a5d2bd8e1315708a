"""Options that the commands of planning share: the trace, the profile, the alphas and the objective."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from paceline.core.errors import InvalidRequest
from paceline.planning import ProfileValue, WorkerProfile, load_profile
from paceline.planning.simulator import Objective
from paceline.planning.simulator.settings import Speculation
from paceline.planning.traces import Trace, TrafficPattern, load_trace, synthesize

TRAFFIC = "Synthetic traffic, in place of a trace"
OBJECTIVE = "Objective"

TraceFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="TRACE",
        help="Trace: .csv (Azure), .jsonl (Mooncake) or .log (of `paceline serve`). Default: synthetic.",
    ),
]
Profile = Annotated[str, typer.Option(metavar="NAME", help="Profile of a target worker: a shipped one, or a file.")]
Alpha = Annotated[
    str | None,
    typer.Option(
        metavar="NUM[,NUM…]", help="Conditional acceptance: one value, or one per position. Default: no drafts."
    ),
]
AlphaSpread = Annotated[
    float, typer.Option(min=0.0, help="Deviation over texts of the log-odds of acceptance; 0: all texts are alike.")
]
MaxDepth = Annotated[int, typer.Option(min=1, max=16, help="Largest depth.")]
Rate = Annotated[float, typer.Option(min=0.0, help="Requests per second.", rich_help_panel=TRAFFIC)]
PromptTokens = Annotated[int, typer.Option(min=1, help="Mean prompt tokens.", rich_help_panel=TRAFFIC)]
OutputTokens = Annotated[int, typer.Option(min=1, help="Mean output tokens.", rich_help_panel=TRAFFIC)]
PrefixTokens = Annotated[
    int, typer.Option(min=0, help="Tokens that prompts of one group share.", rich_help_panel=TRAFFIC)
]
PrefixGroups = Annotated[int, typer.Option(min=1, help="Groups with a common prefix.", rich_help_panel=TRAFFIC)]
Spread = Annotated[
    float, typer.Option(min=0.0, help="Deviation of lengths over their mean; 0: equal ones.", rich_help_panel=TRAFFIC)
]
Burst = Annotated[
    float, typer.Option(min=0.0, help="Deviation of gaps over their mean; 1: Poisson.", rich_help_panel=TRAFFIC)
]
Seconds = Annotated[float | None, typer.Option(min=0.0, help="Time to simulate. Default: the trace, or 300 s.")]
Scale = Annotated[float, typer.Option(min=0.0, help="Factor on the requests of the trace.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of traffic, copies and acceptance.")]
TtftMs = Annotated[float | None, typer.Option(min=0.0, help="Largest time to first token.", rich_help_panel=OBJECTIVE)]
TpotMs = Annotated[float | None, typer.Option(min=0.0, help="Largest mean time per token.", rich_help_panel=OBJECTIVE)]
Share = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Share of requests that must meet them.", rich_help_panel=OBJECTIVE)
]
Price = Annotated[
    float | None, typer.Option(min=0.0, help="Dollars per hour of a target worker. Default: the profile's.")
]
DraftPrice = Annotated[
    float | None, typer.Option(min=0.0, help="Dollars per hour of a draft worker. Default: the profile's.")
]
DEFAULT_SECONDS = 300.0
NO_ALPHA = "No worker drafts in this simulation: give --alpha, the acceptance of your drafts, such as 0.8."


def read_profile(name: str, price: float | None, draft_price: float | None) -> WorkerProfile:
    """A shipped profile or a file, with prices of the command line."""
    profile = load_profile(name)

    def figure(known: ProfileValue, value: float | None) -> ProfileValue:
        return known if value is None else ProfileValue(value, "assumed", "command line")

    return replace(
        profile,
        price_per_hour=figure(profile.price_per_hour, price),
        draft_price_per_hour=figure(profile.draft_price_per_hour, draft_price),
    )


def read_trace(path: Path | None, traffic: TrafficPattern, seconds: float | None, scale: float, seed: int) -> Trace:
    """The first `seconds` of the trace, or synthetic traffic, scaled."""
    if path is None:
        return synthesize(traffic, DEFAULT_SECONDS if seconds is None else seconds, seed).scaled(scale, seed)
    trace = load_trace(path)
    return (trace if seconds is None else trace.first(seconds)).scaled(scale, seed)


def read_speculation(alpha: str | None, max_depth: int, spread: float) -> Speculation | None:
    if alpha is None:
        return None
    try:
        return Speculation(tuple(float(part) for part in alpha.split(",")), max_depth, spread=spread)
    except ValueError:
        raise InvalidRequest(
            f"--alpha takes numbers between 0 and 1, separated by commas, got {alpha!r}", field="alpha"
        ) from None


def read_objective(ttft_ms: float | None, tpot_ms: float | None, share: float) -> Objective:
    limits = [math.inf if limit is None else limit / 1e3 for limit in (ttft_ms, tpot_ms)]
    return Objective(limits[0], limits[1], share)

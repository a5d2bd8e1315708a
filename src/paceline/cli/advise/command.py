"""`paceline advise`: which method, how deep, or not at all."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from paceline.bench.calibrate import Trial
from paceline.bench.presets import DEFAULT_PROMPTS
from paceline.bench.prompts import load_prompts, select
from paceline.cli.advise.case import DraftPlacement, GivenFigures, measured_case
from paceline.cli.advise.files import AdviceFiles
from paceline.cli.options import ENGINE, with_settings
from paceline.cli.render import console
from paceline.cli.render.advice import print_advice
from paceline.cluster.cost.advice import advise
from paceline.core.errors import InvalidRequest
from paceline.core.sampling import SamplingParams
from paceline.core.speculation import MAX_DEPTH
from paceline.server.config.config import ServerConfig

GIVEN = "Given figures, in place of a calibration run"


@with_settings(ENGINE)
def advise_command(
    config: ServerConfig,
    prompts: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="Prompts to calibrate with: lines of JSON, as for `bench`. Default: a built-in set."
        ),
    ] = None,
    max_depth: Annotated[int, typer.Option(min=1, max=MAX_DEPTH, help="Largest depth to consider.")] = 10,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that decode together.")] = 1,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of a calibration answer.")] = 32,
    temperature: Annotated[float, typer.Option(help="Temperature of the calibration; 0 is greedy.")] = 0.0,
    methods: Annotated[
        str | None, typer.Option(metavar="NAME[,NAME…]", help="Methods to calibrate.", show_default="all")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most prompts, taken from all categories in turn.")] = 7,
    price: Annotated[float | None, typer.Option(min=0.0, help="Dollars per hour of the target's devices.")] = None,
    draft_price: Annotated[
        float,
        typer.Option(
            min=0.0, help="Dollars per hour of a pool of draft workers; compares it with a local draft model."
        ),
    ] = 0.0,
    network_ms: Annotated[
        float, typer.Option(min=0.0, help="Network round trip to a pool; compares it with a local draft model.")
    ] = 0.0,
    pool_draft_ms: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Time of one drafted token in a pool, such as idle cores; compares it with a local draft model.",
        ),
    ] = None,
    pool_ready: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of rounds whose draft a pool has ready: it drafts ahead.")
    ] = 0.0,
    alpha: Annotated[
        str | None,
        typer.Option(
            metavar="NUM[,NUM…]", help="Conditional acceptance: one value, or one per position.", rich_help_panel=GIVEN
        ),
    ] = None,
    draft_ms: Annotated[
        float | None, typer.Option(min=0.0, help="Time of one drafted token.", rich_help_panel=GIVEN)
    ] = None,
    verify_ms: Annotated[
        float | None, typer.Option(min=0.0, help="Time of a target pass over all drafts.", rich_help_panel=GIVEN)
    ] = None,
    plain_ms: Annotated[
        float | None,
        typer.Option(min=0.0, help="Time of a plain step. Default: that of a verify pass.", rich_help_panel=GIVEN),
    ] = None,
    method: Annotated[str, typer.Option(help="Name of the method.", rich_help_panel=GIVEN)] = "draft_model",
    target_gb: Annotated[
        float, typer.Option(min=0.0, help="Memory of the target with its cache.", rich_help_panel=GIVEN)
    ] = 0.0,
    draft_gb: Annotated[
        float, typer.Option(min=0.0, help="Memory of the draft with its cache.", rich_help_panel=GIVEN)
    ] = 0.0,
    device_gb: Annotated[
        float | None, typer.Option(min=0.0, help="Memory of the target's device.", rich_help_panel=GIVEN)
    ] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Write a plot.")] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE.html", help="Write an HTML page with table and plot.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures.")] = None,
) -> None:
    """Recommend a method and a depth, or plain decoding, with reasons.

    Based on a short run of the model on this machine or, with --alpha, --draft-ms and --verify-ms, on given figures.
    """
    files = AdviceFiles(plot_file, html_file, json_file)
    files.check()  # before measuring
    pool_seconds = None if pool_draft_ms is None else pool_draft_ms / 1e3
    draft = DraftPlacement(network_ms / 1e3, draft_price, pool_seconds, pool_ready)
    given = GivenFigures(method, alpha, draft_ms, verify_ms, plain_ms, target_gb, draft_gb, device_gb)
    if given and prompts is not None:
        raise InvalidRequest(f"given figures need no prompts: leave out {prompts}, or the figures", field="prompts")
    if given:
        case = given.case(batch, draft)
    else:
        chosen = select(load_prompts(prompts) if prompts else DEFAULT_PROMPTS, limit=limit)
        sampling = SamplingParams(temperature=temperature, max_tokens=tokens, seed=0)
        names = tuple(methods.split(",")) if methods else ()
        case = measured_case(config.engine, Trial(chosen, sampling, max_depth, batch, names), draft)
    case = replace(case, target=replace(case.target, price_per_hour=price))
    advice = advise(case.target, case.methods, max_depth)
    print_advice(advice, case.title, console.out)
    files.write(advice, case)

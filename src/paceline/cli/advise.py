"""`paceline advise`: which method, how deep, or not at all."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.bench.calibrate import Trial
from paceline.bench.default_prompts import DEFAULT_PROMPTS
from paceline.bench.prompts import load_prompts, select
from paceline.cli import console
from paceline.cli.advise_case import Elsewhere, GivenFigures, measured_case
from paceline.cli.advise_tables import print_advice
from paceline.cli.options import ENGINE, with_settings
from paceline.cluster.cost.advice import Advice, advise
from paceline.cluster.cost.cost import Method, Target
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
            metavar="[FILE]", help="Prompts to calibrate with: lines of JSON, as for `bench`. None: a built-in set."
        ),
    ] = None,
    max_depth: Annotated[int, typer.Option(min=1, max=MAX_DEPTH, help="The deepest draft to look at.")] = 10,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that decode together.")] = 1,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of a calibration answer.")] = 32,
    temperature: Annotated[float, typer.Option(help="Of the calibration; 0 is greedy.")] = 0.0,
    methods: Annotated[
        str | None, typer.Option(metavar="NAME[,NAME…]", help="What to calibrate.", show_default="all there are")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts at the most, of all categories in turn.")] = 7,
    price: Annotated[float | None, typer.Option(min=0.0, help="Dollars an hour of the target's devices.")] = None,
    draft_price: Annotated[
        float,
        typer.Option(min=0.0, help="Dollars an hour of the draft model's own devices; 0: it shares the target's."),
    ] = 0.0,
    network_ms: Annotated[float, typer.Option(min=0.0, help="Round trip to a draft model elsewhere.")] = 0.0,
    alpha: Annotated[
        str | None,
        typer.Option(metavar="NUM[,NUM…]", help="Conditional acceptance, or one by position.", rich_help_panel=GIVEN),
    ] = None,
    draft_ms: Annotated[float | None, typer.Option(min=0.0, help="One drafted token.", rich_help_panel=GIVEN)] = None,
    verify_ms: Annotated[
        float | None, typer.Option(min=0.0, help="A target pass over all drafts.", rich_help_panel=GIVEN)
    ] = None,
    plain_ms: Annotated[
        float | None, typer.Option(min=0.0, help="A plain step. None: as a verify pass.", rich_help_panel=GIVEN)
    ] = None,
    method: Annotated[str, typer.Option(help="What to call it.", rich_help_panel=GIVEN)] = "draft_model",
    target_gb: Annotated[
        float, typer.Option(min=0.0, help="Memory of the target with its cache.", rich_help_panel=GIVEN)
    ] = 0.0,
    draft_gb: Annotated[
        float, typer.Option(min=0.0, help="Memory of the draft with its cache.", rich_help_panel=GIVEN)
    ] = 0.0,
    device_gb: Annotated[
        float | None, typer.Option(min=0.0, help="Memory of the target's device.", rich_help_panel=GIVEN)
    ] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw it.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", metavar="FILE.html", help="All of it in a page.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="All figures.")] = None,
) -> None:
    """Say whether to speculate, with which method and how deep, and why.

    From a short run of the model on this machine, or, with --alpha, --draft-ms and --verify-ms, from figures you have.
    """
    for file in (plot_file, html_file, json_file):  # now, not after a minute of measuring
        if file is not None and not file.parent.is_dir():
            raise InvalidRequest(f"cannot write {file}: there is no folder {file.parent}", field="file")
    draft = Elsewhere(network_ms / 1e3, draft_price)
    given = GivenFigures(method, alpha, draft_ms, verify_ms, plain_ms, target_gb, draft_gb, device_gb)
    if given and prompts is not None:
        raise InvalidRequest(f"nothing is run with given figures: leave out {prompts}, or the figures", field="prompts")
    if given:
        case = given.case(batch, draft)
    else:
        chosen = select(load_prompts(prompts) if prompts else DEFAULT_PROMPTS, limit=limit)
        sampling = SamplingParams(temperature=temperature, max_tokens=tokens, seed=0)
        names = tuple(methods.split(",")) if methods else ()
        case = measured_case(config.engine, Trial(chosen, sampling, max_depth, batch, names), draft)
    target = replace(case.target, price_per_hour=price)
    advice = advise(target, case.methods, max_depth)
    print_advice(advice, case.title, console.out)
    _write(advice, case.title, plot_file, html_file)
    if json_file is not None:
        json_file.write_text(json.dumps(_to_json(advice, target, case.methods), indent=2) + "\n", "utf-8")


def _write(advice: Advice, title: str, plot_file: Path | None, html_file: Path | None) -> None:
    if plot_file is None and html_file is None:
        return
    from paceline.bench.advice_plot import draw
    from paceline.cli.advise_page import page

    png = draw(advice, title)
    if plot_file is not None:
        plot_file.write_bytes(png)
    if html_file is not None:
        html_file.write_text(page(advice, title, png), "utf-8")


def _to_json(advice: Advice, target: Target, methods: Sequence[Method]) -> dict[str, Any]:
    return {
        "verdict": advice.verdict,
        "speculate": advice.speculate,
        "choice": asdict(advice.choice),
        "reasons": advice.reasons,
        "cautions": [asdict(caution) for caution in advice.cautions],
        "table": [asdict(one) for one in advice.table],
        "target": asdict(target),
        "methods": [asdict(method) for method in methods],
    }

"""`paceline advise`: which method, how deep, or not at all."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.bench.calibrate import Calibration, Trial, calibrate, calibration_config
from paceline.bench.default_prompts import DEFAULT_PROMPTS
from paceline.bench.prompts import load_prompts, select
from paceline.cli import console
from paceline.cli.advise_tables import print_advice
from paceline.cli.models import loaded
from paceline.cli.options import ENGINE, with_settings
from paceline.cluster.advice import Advice, advise
from paceline.cluster.cost import Footprint, Method, Target
from paceline.core.clock import WallClock
from paceline.core.config import MAX_DEPTH, EngineConfig
from paceline.core.errors import InvalidRequest
from paceline.core.sampling import SamplingParams
from paceline.server.config import ServerConfig

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
    if alpha is not None or draft_ms is not None or verify_ms is not None:
        if alpha is None or draft_ms is None or verify_ms is None:
            raise InvalidRequest("given figures are --alpha, --draft-ms and --verify-ms, all three", field="alpha")
        # A pass over drafts of any depth takes the same: that is what one figure says.
        passes = {batch: (plain_ms or verify_ms) / 1e3, 2 * batch: verify_ms / 1e3}
        memory = None if device_gb is None else int(device_gb * 1e9)
        target = Target(passes, batch, _gigabytes(target_gb), memory_bytes=memory)
        drafts = {depth: depth * draft_ms / 1e3 for depth in (0, MAX_DEPTH)}
        ways = [Method(method, _alphas(alpha), drafts, footprint=_gigabytes(draft_gb))]
        title = f"{method}, batch {batch}, from given figures"
    else:
        trial = Trial(
            select(load_prompts(prompts) if prompts else DEFAULT_PROMPTS, limit=limit),
            SamplingParams(temperature=temperature, max_tokens=tokens, seed=0),
            max_depth,
            batch,
            tuple(methods.split(",")) if methods else (),
        )
        calibration = _calibrate(config.engine, trial)
        target, ways = calibration.target, list(calibration.methods)
        title = f"{config.engine.model}, batch {batch}, temperature {temperature:g}, measured here"
        if calibration.silent:
            title += f"; nothing to draft with: {', '.join(calibration.silent)}"
    ways = [
        replace(one, network_seconds=network_ms / 1e3, price_per_hour=draft_price)
        if alpha or one.name == "draft_model"
        else one
        for one in ways
    ]
    target = replace(target, price_per_hour=price)
    advice = advise(target, ways, max_depth)
    print_advice(advice, title, console.out)
    _write(advice, title, plot_file, html_file)
    if json_file is not None:
        json_file.write_text(json.dumps(_to_json(advice, target, ways), indent=2) + "\n", "utf-8")


def _calibrate(engine: EngineConfig, trial: Trial) -> Calibration:
    with loaded(calibration_config(engine, trial.max_depth)) as llm, console.err.status("calibrating") as status:
        return calibrate(llm, trial, WallClock(), lambda part: status.update(f"calibrating: {part}"))


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


def _to_json(advice: Advice, target: Target, methods: list[Method]) -> dict[str, Any]:
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


def _alphas(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InvalidRequest(
            f"--alpha takes numbers between 0 and 1, one or several with commas, got {text!r}", field="alpha"
        ) from None


def _gigabytes(size: float) -> Footprint:
    return Footprint(weight_bytes=int(size * 1e9))

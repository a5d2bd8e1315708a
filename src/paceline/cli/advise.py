"""`paceline advise`: which method, how deep, or not at all."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.bench.calibrate import Trial, calibrate, calibration_config
from paceline.bench.presets import DEFAULT_PROMPTS
from paceline.bench.prompts import load_prompts, select
from paceline.cli.options import ENGINE, with_settings
from paceline.cli.render import console
from paceline.cli.render.advice import print_advice
from paceline.cli.render.console import loaded
from paceline.cluster.cost.advice import POOL, Advice, advise
from paceline.cluster.cost.cost import Footprint, Method, Target
from paceline.core.clock import WallClock
from paceline.core.config import EngineConfig
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
            metavar="[FILE]", help="Prompts to calibrate with: lines of JSON, as for `bench`. Default: a built-in set."
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
    for file in (plot_file, html_file, json_file):  # before measuring
        if file is not None and not file.parent.is_dir():
            raise InvalidRequest(f"cannot write {file}: there is no folder {file.parent}", field="file")
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
    target = replace(case.target, price_per_hour=price)
    advice = advise(target, case.methods, max_depth)
    print_advice(advice, case.title, console.out)
    _write(advice, case.title, plot_file, html_file)
    if json_file is not None:
        json_file.write_text(json.dumps(_to_json(advice, target, case.methods), indent=2) + "\n", "utf-8")


def _write(advice: Advice, title: str, plot_file: Path | None, html_file: Path | None) -> None:
    if plot_file is None and html_file is None:
        return
    from paceline.bench.plots import plot_advice
    from paceline.cli.render.advice import page

    png = plot_advice(advice, title)
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


@dataclass(frozen=True, slots=True)
class DraftPlacement:
    """The cost of drafts from another machine; false if there is none."""

    network_seconds: float
    price_per_hour: float
    draft_seconds: float | None = None
    """Time of one drafted token; None: that of the local draft model."""
    ready: float = 0.0
    """Share of rounds of a sequence whose draft is ready."""

    def __bool__(self) -> bool:
        return self.network_seconds > 0.0 or self.price_per_hour > 0.0 or self.is_compared

    @property
    def is_compared(self) -> bool:
        """Whether the pool has figures of its own, so that it is compared with a local draft model."""
        return self.draft_seconds is not None or self.ready > 0.0


@dataclass(frozen=True, slots=True)
class Case:
    """A target and the methods to choose from."""

    target: Target
    methods: tuple[Method, ...]
    title: str


@dataclass(frozen=True, slots=True)
class GivenFigures:
    """The figures of the command line, in its units."""

    method: str
    alpha: str | None
    draft_ms: float | None
    verify_ms: float | None
    plain_ms: float | None
    target_gb: float
    draft_gb: float
    device_gb: float | None

    def __bool__(self) -> bool:
        return self.alpha is not None or self.draft_ms is not None or self.verify_ms is not None

    def case(self, batch: int, draft: DraftPlacement) -> Case:
        if self.alpha is None or self.draft_ms is None or self.verify_ms is None:
            raise InvalidRequest("given figures need all three of --alpha, --draft-ms and --verify-ms", field="alpha")
        # One figure stands for a pass over drafts of any depth.
        passes = {batch: (self.plain_ms or self.verify_ms) / 1e3, 2 * batch: self.verify_ms / 1e3}
        memory = None if self.device_gb is None else int(self.device_gb * 1e9)
        drafts = {depth: depth * self.draft_ms / 1e3 for depth in (0, MAX_DEPTH)}
        method = Method(self.method, _alphas(self.alpha), drafts, footprint=_gigabytes(self.draft_gb))
        return Case(
            Target(passes, batch, _gigabytes(self.target_gb), memory_bytes=memory),
            (method, in_pool(method, draft, batch)) if draft.is_compared else (_placed(method, draft),),
            f"{self.method}, batch {batch}, from given figures",
        )


def measured_case(engine: EngineConfig, trial: Trial, draft: DraftPlacement) -> Case:
    """A case from a short run of the model on this machine. With a placement, a pool that drafts with the same model is another
    method."""
    with loaded(calibration_config(engine, trial.max_depth)) as llm, console.err.status("calibrating") as status:
        found = calibrate(llm, trial, WallClock(), lambda part: status.update(f"calibrating: {part}"))
    title = f"{engine.model}, batch {trial.batch}, temperature {trial.sampling.temperature:g}, measured here"
    if found.silent:
        title += f"; drafted nothing: {', '.join(found.silent)}"
    pools = (in_pool(one, draft, trial.batch) for one in found.methods if one.name == "draft_model" and draft)
    return Case(found.target, (*found.methods, *pools), title)


def in_pool(method: Method, placement: DraftPlacement, batch: int) -> Method:
    """The method `pool`: the same drafts from workers with memory of their own. A step that finds the drafts of all its
    sequences ready waits for neither the drafts nor the network."""
    waiting = 1.0 - placement.ready**batch
    each = placement.draft_seconds
    drafts = {
        depth: waiting * (seconds if each is None else depth * each) for depth, seconds in method.draft_seconds.items()
    }
    remote = replace(_placed(method, placement), name=POOL, footprint=Footprint(), draft_seconds=drafts)
    return replace(remote, network_seconds=waiting * remote.network_seconds)


def _placed(method: Method, placement: DraftPlacement) -> Method:
    return replace(method, network_seconds=placement.network_seconds, price_per_hour=placement.price_per_hour)


def _alphas(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InvalidRequest(
            f"--alpha takes numbers between 0 and 1, separated by commas, got {text!r}", field="alpha"
        ) from None


def _gigabytes(size: float) -> Footprint:
    return Footprint(weight_bytes=int(size * 1e9))

"""`paceline advise`: which method, how deep, or not at all.

The case is a target and its methods, from given figures or measured here. The command prints the advice as a terminal table and
writes it as files, one of them an HTML page.
"""

import base64
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from paceline.cli import advise as options
from paceline.cli import console
from paceline.cli.console import loaded
from paceline.cli.options import ENGINE, JsonFile, check_folders, check_plots, print_written, with_settings, write_json
from paceline.core.clock import WallClock
from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidRequest
from paceline.core.request import MAX_DEPTH, SamplingParams
from paceline.gateway.config import ServerConfig
from paceline.policy.cost.advice import POOL, Advice, advise
from paceline.policy.cost.cost import Estimate, Footprint, MethodCosts, TargetCosts
from paceline.tools.inflate import Trial, calibrate, calibration_config
from paceline.tools.prompts import DEFAULT_PROMPTS, load_prompts, select


@dataclass(frozen=True, slots=True)
class DraftPlacement:
    """The cost of drafts from another machine. It is false if no drafts come from another machine."""

    network_seconds: float
    price_per_hour: float
    draft_seconds: float | None = None
    """Time of one drafted token. If it is None, that of the local draft model counts."""
    ready: float = 0.0
    """Share of rounds of a sequence whose draft is ready."""

    def __bool__(self) -> bool:
        return self.network_seconds > 0.0 or self.price_per_hour > 0.0 or self.is_compared

    @property
    def is_compared(self) -> bool:
        """Whether the pool has figures of its own, so that it is compared with a local draft model."""
        return self.draft_seconds is not None or self.ready > 0.0


@dataclass(frozen=True, slots=True)
class AdviceInput:
    """A target and the methods to choose from."""

    target: TargetCosts
    methods: tuple[MethodCosts, ...]
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

    def case(self, batch: int, draft: DraftPlacement) -> AdviceInput:
        if self.alpha is None or self.draft_ms is None or self.verify_ms is None:
            raise InvalidRequest("given figures need all three of --alpha, --draft-ms and --verify-ms", field="alpha")
        # One figure stands for a pass over drafts of any depth.
        passes = {batch: (self.plain_ms or self.verify_ms) / 1e3, 2 * batch: self.verify_ms / 1e3}
        memory = None if self.device_gb is None else int(self.device_gb * 1e9)
        drafts = {depth: depth * self.draft_ms / 1e3 for depth in (0, MAX_DEPTH)}
        method = MethodCosts(self.method, _alphas(self.alpha), drafts, footprint=_gigabytes(self.draft_gb))
        return AdviceInput(
            TargetCosts(passes, batch, _gigabytes(self.target_gb), memory_bytes=memory),
            (method, in_pool(method, draft, batch)) if draft.is_compared else (_placed(method, draft),),
            f"{self.method}, batch {batch}, from given figures",
        )


def measured_case(engine: EngineConfig, trial: Trial, draft: DraftPlacement) -> AdviceInput:
    """A case from a short run of the model on this machine. With a placement, a pool that drafts with the same model is another
    method."""
    with loaded(calibration_config(engine, trial.max_depth)) as llm, console.err.status("calibrating") as status:

        def show(part: str) -> None:
            status.update(f"calibrating: {part}")
            if not console.err.is_terminal:  # a spinner shows nothing in a log
                console.err.print(f"calibrating: {part}", markup=False, highlight=False)

        found = calibrate(llm, trial, WallClock(), show)
    title = f"{engine.model}, batch {trial.batch}, temperature {trial.sampling.temperature:g}, measured here"
    if found.silent:
        title += f"; drafted nothing: {', '.join(found.silent)}"
    pools = (
        in_pool(estimate, draft, trial.batch) for estimate in found.methods if estimate.name == "draft_model" and draft
    )
    return AdviceInput(found.target, (*found.methods, *pools), title)


def in_pool(method: MethodCosts, placement: DraftPlacement, batch: int) -> MethodCosts:
    """The method `pool`, which gets the same drafts from workers with memory of their own. A step that finds the drafts of all
    its sequences ready waits for neither the drafts nor the network."""
    waiting = 1.0 - placement.ready**batch
    each = placement.draft_seconds
    drafts = {
        depth: waiting * (seconds if each is None else depth * each) for depth, seconds in method.draft_seconds.items()
    }
    remote = replace(_placed(method, placement), name=POOL, footprint=Footprint(), draft_seconds=drafts)
    return replace(remote, network_seconds=waiting * remote.network_seconds)


def _placed(method: MethodCosts, placement: DraftPlacement) -> MethodCosts:
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


@dataclass(frozen=True, slots=True)
class AdviceFiles:
    """A file that is None is not written."""

    plot: Path | None
    html: Path | None
    json: Path | None

    def check(self) -> None:
        """Raise `InvalidRequest` if the folder of a file does not exist, `MissingDependency` without matplotlib."""
        check_folders(self.plot, self.html, self.json)
        check_plots(self.plot, self.html)

    def write(self, advice: Advice, case: AdviceInput) -> None:
        if self.plot is not None or self.html is not None:
            self._write_plots(advice, case.title)
        if self.json is not None:
            write_json(self.json, _to_json(advice, case))
        print_written(self.plot, self.html, self.json)

    def _write_plots(self, advice: Advice, title: str) -> None:
        from paceline.tools.plots import plot_advice

        png = plot_advice(advice, title)
        if self.plot is not None:
            self.plot.write_bytes(png)
        if self.html is not None:
            self.html.write_text(page(advice, title, png), "utf-8")


def _to_json(advice: Advice, case: AdviceInput) -> dict[str, Any]:
    return {
        "verdict": advice.verdict,
        "speculate": advice.speculate,
        "choice": asdict(advice.choice),
        "reasons": advice.reasons,
        "cautions": [asdict(caution) for caution in advice.cautions],
        "table": [asdict(prospect) for prospect in advice.table],
        "target": asdict(case.target),
        "methods": [asdict(method) for method in case.methods],
    }


GIVEN = "Given figures, in place of a calibration run"

Prompts = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE", help="Prompts to calibrate with: lines of JSON, as for `bench`. Default: a built-in set."
    ),
]
MaxDepth = Annotated[int, typer.Option(min=1, max=MAX_DEPTH, help="Largest depth to consider.")]
Batch = Annotated[int, typer.Option(min=1, help="Sequences that decode together.")]
Tokens = Annotated[int, typer.Option(min=8, help="Tokens of a calibration answer.")]
Temperature = Annotated[float, typer.Option(help="Temperature of the calibration; 0 is greedy.")]
Methods = Annotated[str | None, typer.Option(metavar="NAME[,NAME…]", help="Methods to calibrate.", show_default="all")]
Limit = Annotated[int, typer.Option(min=1, help="Most prompts, taken from all categories in turn.")]
Price = Annotated[float | None, typer.Option(min=0.0, help="Dollars per hour of the target's devices.")]

DraftPrice = Annotated[
    float,
    typer.Option(min=0.0, help="Dollars per hour of a pool of draft workers; compares it with a local draft model."),
]
NetworkMs = Annotated[
    float, typer.Option(min=0.0, help="Network round trip to a pool; compares it with a local draft model.")
]
PoolDraftMs = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Time of one drafted token in a pool, such as idle cores; compares it with a local draft model.",
    ),
]
PoolReady = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Share of rounds whose draft a pool has ready: it drafts ahead.")
]

Alpha = Annotated[
    str | None,
    typer.Option(
        metavar="NUM[,NUM…]", help="Conditional acceptance: one value, or one per position.", rich_help_panel=GIVEN
    ),
]
DraftMs = Annotated[float | None, typer.Option(min=0.0, help="Time of one drafted token.", rich_help_panel=GIVEN)]
VerifyMs = Annotated[
    float | None, typer.Option(min=0.0, help="Time of a target pass over all drafts.", rich_help_panel=GIVEN)
]
PlainMs = Annotated[
    float | None,
    typer.Option(min=0.0, help="Time of a plain step. Default: that of a verify pass.", rich_help_panel=GIVEN),
]
MethodName = Annotated[str, typer.Option(help="Name of the method.", rich_help_panel=GIVEN)]
TargetGb = Annotated[float, typer.Option(min=0.0, help="Memory of the target with its cache.", rich_help_panel=GIVEN)]
DraftGb = Annotated[float, typer.Option(min=0.0, help="Memory of the draft with its cache.", rich_help_panel=GIVEN)]
DeviceGb = Annotated[float | None, typer.Option(min=0.0, help="Memory of the target's device.", rich_help_panel=GIVEN)]

PlotFile = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Write a plot.")]
HtmlFile = Annotated[
    Path | None, typer.Option("--html", metavar="FILE.html", help="Write an HTML page with table and plot.")
]


@dataclass(frozen=True, slots=True)
class Column:
    heading: str
    cell: Callable[[Estimate], str]


def columns(advice: Advice) -> list[Column]:
    """The columns that have a value in some row."""
    found = [
        Column("method", lambda row: row.method),
        Column("depth", lambda row: str(row.depth)),
        Column("alpha", lambda row: f"{row.alpha:.2f}" if row.depth else "-"),
        Column("tokens\n/round", lambda row: f"{row.tokens:.2f}"),
        Column("draft\nms", lambda row: _ms(row.draft_seconds)),
        Column("verify\nms", lambda row: _ms(row.verify_seconds)),
    ]
    if any(row.network_seconds for row in advice.table):
        found.append(Column("net\nms", lambda row: _ms(row.network_seconds)))
    found += [
        Column("speed", lambda row: f"{row.speedup:.2f}x"),
        Column("tokens\n/s", lambda row: f"{row.tokens_per_second:.1f}"),
    ]
    if any(row.memory_bytes for row in advice.table):
        found.append(Column("GB", lambda row: f"{row.memory_bytes / 1e9:.2f}" + ("" if row.fits else " !")))
    if any(row.dollars_per_million is not None for row in advice.table):
        found.append(Column("$ per\nmillion", lambda row: f"{row.dollars_per_million or 0.0:.2f}"))
    return found


def print_advice(advice: Advice, title: str, console: Console) -> None:
    console.print(title, style="bold", markup=False)
    shown = columns(advice)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0))
    for i, column in enumerate(shown):
        table.add_column(column.heading, justify="right" if i else "left", no_wrap=True)
    last = advice.table[0].method
    for row in advice.table:
        if row.method != last:
            table.add_section()
            last = row.method
        style = "bold green" if row == advice.choice else "dim" if row.speedup < 1.0 or not row.fits else ""
        table.add_row(*(column.cell(row) for column in shown), style=style)
    console.print(table)
    console.print()
    console.print(advice.verdict, style="bold green" if advice.speculate else "bold yellow", markup=False)
    for reason in advice.reasons:
        console.print(f"- {reason}", markup=False)
    for caution in advice.cautions:
        console.print(f"! {caution}", style="yellow", markup=False)


def _ms(seconds: float) -> str:
    return f"{1000.0 * seconds:.2f}" if seconds else "-"


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1f2328; }
h1 { font-size: 1.4rem; } img { max-width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem; text-align: right; } th { border-bottom: 2px solid #57606a; }
th:first-child, td:first-child { text-align: left; }
tr.first td { border-top: 1px solid #d0d7de; }
tr.choice { background: #dafbe1; font-weight: 600; } tr.loss { color: #8c959f; }
.caution { color: #9a6700; }
"""


def page(advice: Advice, title: str, png: bytes) -> str:
    """One HTML file without external resources."""
    shown = columns(advice)
    rows, last = [], advice.table[0].method
    for row in advice.table:
        marks = ["first"] if row.method != last else []
        marks += ["choice"] if row == advice.choice else ["loss"] if row.speedup < 1.0 or not row.fits else []
        cells = "".join(f"<td>{escape(column.cell(row))}</td>" for column in shown)
        rows.append(f'<tr class="{" ".join(marks)}">{cells}</tr>')
        last = row.method
    headings = "".join(f"<th>{escape(column.heading)}</th>" for column in shown)
    notes = [f"<li>{escape(reason)}</li>" for reason in advice.reasons]
    notes += [f'<li class="caution">{escape(str(caution))}</li>' for caution in advice.cautions]
    picture = base64.b64encode(png).decode("ascii")
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{escape(advice.verdict)}</title>\n'
        f"<style>{STYLE}</style></head>\n<body>\n<h1>{escape(advice.verdict)}</h1>\n<p>{escape(title)}</p>\n"
        f'<ul>\n{chr(10).join(notes)}\n</ul>\n<img alt="speed and tokens by depth" src="data:image/png;base64,{picture}">\n'
        f"<table>\n<thead><tr>{headings}</tr></thead>\n<tbody>\n{chr(10).join(rows)}\n</tbody>\n</table>\n</body>\n</html>\n"
    )


@with_settings(ENGINE)
def advise_command(
    config: ServerConfig,
    prompts: options.Prompts = None,
    max_depth: options.MaxDepth = 10,
    batch: options.Batch = 1,
    tokens: options.Tokens = 32,
    temperature: options.Temperature = 0.0,
    methods: options.Methods = None,
    limit: options.Limit = 7,
    price: options.Price = None,
    draft_price: options.DraftPrice = 0.0,
    network_ms: options.NetworkMs = 0.0,
    pool_draft_ms: options.PoolDraftMs = None,
    pool_ready: options.PoolReady = 0.0,
    alpha: options.Alpha = None,
    draft_ms: options.DraftMs = None,
    verify_ms: options.VerifyMs = None,
    plain_ms: options.PlainMs = None,
    method: options.MethodName = "draft_model",
    target_gb: options.TargetGb = 0.0,
    draft_gb: options.DraftGb = 0.0,
    device_gb: options.DeviceGb = None,
    plot_file: options.PlotFile = None,
    html_file: options.HtmlFile = None,
    json_file: JsonFile = None,
) -> None:
    """Recommend a method and a depth, or plain decoding, with reasons.

    Based on a short run of the model on this machine or, with --alpha, --draft-ms and --verify-ms, on given figures.
    """
    files = AdviceFiles(plot_file, html_file, json_file)
    files.check()  # before measuring
    pool_seconds = None if pool_draft_ms is None else pool_draft_ms / 1e3
    draft = DraftPlacement(network_ms / 1e3, draft_price, pool_seconds, pool_ready)
    given = GivenFigures(method, alpha, draft_ms, verify_ms, plain_ms, target_gb, draft_gb, device_gb)
    if given:
        case = _given_case(given, prompts, batch, draft)
    else:
        chosen = select(load_prompts(prompts) if prompts else DEFAULT_PROMPTS, limit=limit)
        sampling = SamplingParams(temperature=temperature, max_tokens=tokens, seed=0)
        names = tuple(methods.split(",")) if methods else ()
        case = measured_case(config.engine, Trial(chosen, sampling, max_depth, batch, names), draft)
    case = replace(case, target=replace(case.target, price_per_hour=price))
    advice = advise(case.target, case.methods, max_depth)
    print_advice(advice, case.title, console.out)
    files.write(advice, case)


def _given_case(given: GivenFigures, prompts: Path | None, batch: int, draft: DraftPlacement) -> AdviceInput:
    if prompts is not None:
        raise InvalidRequest(f"given figures need no prompts: leave out {prompts}, or the figures", field="prompts")
    return given.case(batch, draft)

"""`paceline bench`: plain and speculative decoding side by side, and inflated targets for it.

`print_report` and `print_profiles` print bench reports and profiles as terminal tables.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli import console
from paceline.cli.console import counting_bar, loaded
from paceline.cli.options import (
    ENGINE,
    JsonFile,
    check_folders,
    check_plots,
    default_to,
    print_written,
    with_settings,
    write_json,
)
from paceline.core.clock import WallClock
from paceline.core.config import EngineConfig
from paceline.core.machine import cpu_name, usable_cores
from paceline.core.request import SamplingParams
from paceline.gateway.config import ServerConfig
from paceline.tools.bench import (
    MIN_TRIALS,
    Alpha,
    EngineContender,
    Measured,
    MeasuredSystem,
    ProfiledContender,
    Report,
    Summary,
    Workload,
    compare,
    connect,
)
from paceline.tools.profile import LABELS, Profile, Recorder, RoundTimes, profile
from paceline.tools.prompts import DEFAULT, DEFAULT_PROMPTS, PRESETS, Preset, find_preset, load_prompts, select

if TYPE_CHECKING:
    from paceline.engine.start import LLM


def print_report(report: Report, console: Console) -> None:
    console.print(report.about["title"], style="bold", markup=False)
    console.print(_overall(report))
    console.print(_by_category(report))
    for contender in report.contenders:
        if contender.overall.drafted:
            console.print(_alphas(contender))
    for contender in report.contenders[1:]:
        _print_identity(contender, report.contenders[0].name, console)


def _overall(report: Report) -> Table:
    table = Table("", *(contender.name for contender in report.contenders), title="All prompts", title_justify="left")
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    reference = report.contenders[0].overall.tokens_per_second
    summaries = [contender.overall for contender in report.contenders]
    table.add_row("tokens per second", *(_speed(summary, reference) for summary in summaries))
    if report.price is not None:
        costs = [report.dollars_per_million(contender) for contender in report.contenders]
        table.add_row("dollars per million tokens", *("-" if cost is None else f"{cost:.4g}" for cost in costs))
    table.add_row("first token, p50 / p99", *(_pair(s.ttft_p50, s.ttft_p99) for s in summaries))
    table.add_row("per token, p50 / p99", *(_pair(s.token_p50, s.token_p99) for s in summaries))
    table.add_row("tokens per round", *(_number(s.tokens_per_round) for s in summaries))
    table.add_row("drafts accepted, drafted", *(f"{s.accepted}, {s.drafted}" if s.drafted else "-" for s in summaries))
    table.add_row("draft acceptance rate", *(_number(s.draft_acceptance_rate) for s in summaries))
    table.add_row("requests, tokens", *(f"{s.requests}, {s.tokens}" for s in summaries))
    return table


def _by_category(report: Report) -> Table:
    table = Table("category", title="By category, tokens per second of one request", title_justify="left")
    for contender in report.contenders:
        table.add_column(contender.name, justify="right")
    for heading in ("tokens per round", "alpha"):
        table.add_column(heading, justify="right")
    speculative = _speculative(report)
    for category in report.categories:
        summaries = [contender.by_category[category] for contender in report.contenders]
        table.add_row(
            category,
            *(_speed(summary, summaries[0].tokens_per_second) for summary in summaries),
            _number(speculative.by_category[category].tokens_per_round),
            _number(speculative.by_category[category].alpha),
        )
    return table


def _alphas(contender: Measured) -> Table:
    """Alpha per position. Dim values have few trials."""
    alphas = contender.overall.alphas
    table = Table(title=f"Alpha by position, {contender.name}", title_justify="left")
    table.add_column("category", no_wrap=True)
    for position in range(1, len(alphas) + 1):
        table.add_column(str(position), justify="right")
    for category, summary in contender.by_category.items():
        if summary.drafted:
            table.add_row(category, *map(_alpha, summary.alphas))
    table.add_section()
    table.add_row("all", *map(_alpha, alphas))
    table.add_row("trials", *(str(alpha.trials) for alpha in alphas))
    return table


def _alpha(alpha: Alpha) -> Text:
    return Text(f"{alpha.value:.2f}", "dim" if alpha.trials < MIN_TRIALS else "")


def _print_identity(contender: Measured, reference: str, console: Console) -> None:
    if not contender.differences:
        console.print(
            f"{contender.name}: all {contender.compared} answers are identical to {reference}.",
            style="green",
            markup=False,
        )
        return
    console.print(
        f"{contender.name}: {len(contender.differences)} of {contender.compared} answers differ from {reference}.",
        style="red",
        markup=False,
    )
    for difference in contender.differences[:3]:
        console.print(
            f"  answer {difference.answer} ({difference.category}), character {difference.character}: "
            f"{difference.expected!r} expected, {difference.found!r} found",
            markup=False,
        )


def _speculative(report: Report) -> Measured:
    return next((contender for contender in report.contenders if contender.overall.drafted), report.contenders[0])


def _speed(summary: Summary, reference: float) -> str:
    speed = summary.tokens_per_second
    factor = f" ({speed / reference:.2f}x)" if reference and speed != reference else ""
    return f"{speed:.1f}{factor}"


def _pair(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{1000 * low:.1f} / {1000 * high:.1f} ms"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def print_profiles(profiles: Sequence[Profile], console: Console) -> None:
    table = Table(title="Time of each part of a round, mean", title_justify="left")
    table.add_column("", no_wrap=True)
    for measured in profiles:
        table.add_column(measured.name, justify="right")
    for i, share in enumerate(profiles[0].parts):
        parts = [measured.parts[i] for measured in profiles]
        table.add_row(LABELS[share.part], *(_share(part.seconds, part.fraction) for part in parts))
    table.add_section()
    table.add_row("round", *(f"{1000 * measured.seconds:.2f} ms" for measured in profiles))
    table.add_row("round, p50", *(f"{1000 * measured.median_seconds:.2f} ms" for measured in profiles))
    table.add_row("rounds", *(str(measured.num_rounds) for measured in profiles))
    table.add_section()
    table.add_row("bytes read", *(f"{measured.bytes_read / 1e6:.1f} MB" for measured in profiles))
    table.add_row(
        "bandwidth floor", *(_share(measured.floor_seconds, measured.floor_fraction) for measured in profiles)
    )
    console.print(table)
    console.print(
        f"Floor: the time to read a round's weights and cache once at {profiles[0].bandwidth / 1e9:.1f} GB/s.",
        style="dim",
        markup=False,
    )


def _share(seconds: float, fraction: float) -> str:
    return f"{1000 * seconds:.2f} ms {fraction:>6.1%}"


EPILOG = "Presets:\n\n" + "\n".join(f"- **{preset.name}**: {preset.about}" for preset in PRESETS.values())


@with_settings(ENGINE)
def bench(
    config: ServerConfig,
    prompts: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="Lines of JSON with `prompt`, `question`, `turns` or `messages`, and a `category`. Default: a built-in set.",
        ),
    ] = None,
    preset: Annotated[str, typer.Option(help="A scenario from the list below.")] = DEFAULT.name,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Concurrent requests.", show_default="the preset's")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of an answer.", show_default="the preset's")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", show_default="the preset's")] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the first prompt; every next prompt has the next seed.")
    ] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Most prompts, taken from all categories in turn.")] = None,
    json_file: JsonFile = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Plot speeds and alphas.")
    ] = None,
    profile_file: Annotated[
        Path | None,
        typer.Option("--profile", metavar="FILE.png", help="Print and plot the time of each part of a step."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="URL", help="Measure this OpenAI-compatible server too, over HTTP.")
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(min=0.0, help="Dollars per hour of the devices; prints the cost of a million tokens."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OPENAI_API_KEY", help="API key of that server.", show_envvar=True, show_default=False),
    ] = None,
) -> None:
    """Measure the speed of speculation on your prompts, and check that the text is the same.

    The same requests run plain and speculative, in turns. Exit status 1: some text differed. `paceline bench inflate`
    makes a large target from a small model.
    """
    chosen = find_preset(preset)
    workload = _workload(chosen, prompts, limit, concurrency, tokens, temperature, seed)
    files = _Files(json_file, plot_file, profile_file)
    files.check()  # before measuring
    with loaded(config.engine) as llm:
        recorder = None if profile_file is None else Recorder(WallClock())
        contenders = asyncio.run(_measure(llm, workload, against, api_key, recorder))
        profiles = [] if recorder is None else _profiles(recorder, llm)
    report = Report(_about(config, chosen.name, prompts, workload), contenders, price)
    print_report(report, console.out)
    if profiles:
        print_profiles(profiles, console.out)
    files.write(report, profiles)
    if contenders[1].differences:  # another server may serve another model
        raise typer.Exit(1)


def _workload(
    preset: Preset,
    prompts: Path | None,
    limit: int | None,
    concurrency: int | None,
    tokens: int | None,
    temperature: float | None,
    seed: int,
) -> Workload:
    """The workload of the preset. An option that is not None replaces the preset's value."""
    own = {} if temperature is None else {"temperature": temperature}
    return Workload(
        prompts=select(load_prompts(prompts), limit=limit)
        if prompts
        else select(DEFAULT_PROMPTS, preset.categories, limit),
        sampling=SamplingParams(**{**preset.sampling, "max_tokens": tokens or preset.tokens, "seed": seed} | own),
        concurrency=concurrency or preset.concurrency,
        system=preset.system,
    )


@dataclass(frozen=True, slots=True)
class _Files:
    """The files to write. A file that is None is not written."""

    json: Path | None
    plot: Path | None
    profile: Path | None

    def check(self) -> None:
        """Raise `InvalidRequest` if the folder of a file does not exist, `MissingDependency` without matplotlib."""
        check_folders(self.json, self.plot, self.profile)
        check_plots(self.plot, self.profile)

    def write(self, report: Report, profiles: list[Profile]) -> None:
        if self.json is not None:
            figures = report.to_json() | (
                {"profiles": [measured.to_json() for measured in profiles]} if profiles else {}
            )
            write_json(self.json, figures)
        if self.plot is not None:
            from paceline.tools.plots import plot_report

            plot_report(report, self.plot)
        if self.profile is not None and profiles:
            from paceline.tools.plots import plot_profiles

            plot_profiles(profiles, str(report.about["title"]), self.profile)
        print_written(self.json, self.plot, self.profile if profiles else None)


async def _measure(
    llm: "LLM", workload: Workload, against: str | None, api_key: str | None, recorder: Recorder | None
) -> tuple[Measured, ...]:
    clock = WallClock()
    async with AsyncExitStack() as stack:
        contenders: list[MeasuredSystem] = [
            EngineContender("plain", llm, False, clock),
            EngineContender("speculative", llm, True, clock),
        ]
        if recorder is not None:
            stack.enter_context(llm.engine.hooks.listening(recorder))
            contenders = [ProfiledContender(contender, recorder) for contender in contenders]
        if against is not None:
            contenders.append(await stack.enter_async_context(connect(against, api_key, clock)))
        bar = stack.enter_context(counting_bar())
        task = bar.add_task("conversations", total=len(workload.prompts) * len(contenders))
        return await compare(contenders, workload, clock, lambda done: bar.advance(task, done))


def _profiles(recorder: Recorder, llm: "LLM") -> list[Profile]:
    """One profile per contender, of rounds that only decode."""
    from paceline.tools.footprint import copy_bandwidth

    bandwidth = copy_bandwidth(llm.engine.runner.device, WallClock())
    rounds: dict[str, list[RoundTimes]] = {}
    for round_ in recorder.rounds:
        if round_.is_decode:
            rounds.setdefault(round_.label, []).append(round_.times)
    found = (profile(name, times, bandwidth) for name, times in rounds.items())
    return [value for value in found if value is not None]


def _about(config: ServerConfig, preset: str, prompts: Path | None, workload: Workload) -> dict[str, Any]:
    from paceline.engine.start import draft_of, pick_device

    engine, sampling = config.engine, workload.sampling
    draft = draft_of(engine)
    where = cpu_name() if pick_device(engine.device).type == "cpu" else ""
    title = (
        f"{engine.model}{f' with draft {draft}' if draft else ''}, temperature {sampling.temperature:g}, "
        f"{workload.concurrency} concurrent, up to {sampling.max_tokens} tokens"
        f"{f', {usable_cores()} cores of {where}' if where else ''}"
    )
    return {
        "title": title,
        "cpu": where or None,
        "model": engine.model,
        "draft": draft,
        "preset": preset,
        "prompts": "built-in" if prompts is None else str(prompts),
        "num_prompts": len(workload.prompts),
        "concurrency": workload.concurrency,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
    }


def inflate(
    shape: Annotated[str, typer.Option(help="llama-1b, llama-8b or llama-70b.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder; must not exist.")],
    base: Annotated[str, typer.Option(help="The small Llama: a folder, a GGUF file or a name.")] = "smollm2",
    noise: Annotated[
        float,
        typer.Option(
            help="Noise added to the small model's layers, in standard deviations of a weight; it lowers alpha."
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of noise and filler weights.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    quantization: Annotated[str, typer.Option(help="none, int8 or fp8; of the layers' matrices.")] = "none",
    device: Annotated[str, typer.Option(help="Device that generates the random numbers.")] = "cpu",
) -> None:
    """Write a model with the cost of a large one and the text of a small one.

    The folder loads in Paceline and in transformers. The same model without a folder, as the value of --model:
    `inflate:llama-8b?base=smollm2&noise=0.06&seed=0`.
    """
    from paceline.engine.start import pick_device, pick_dtype, pick_quantization
    from paceline.model_files.hub import Inflation
    from paceline.tools.inflate import (
        make,
        write_folder,  # imports torch
    )

    config = EngineConfig(device=device, dtype=dtype, quantization=quantization)  # type: ignore[arg-type]  # validated there
    where = pick_device(config.device)
    checkpoint = make(
        Inflation(shape, base, noise, seed),
        where,
        pick_dtype(config.dtype, where),
        pick_quantization(config.quantization),
    )
    with counting_bar() as bar:
        task = bar.add_task("weights", total=None)
        size = write_folder(checkpoint, out, lambda done, of: bar.update(task, completed=done, total=of))
    parameters = checkpoint.config.num_parameters
    summary = f"{checkpoint.name}: {parameters / 1e9:.2f} billion weights, {size / 1e9:.1f} GB in {out}"
    console.out.print(summary, markup=False, soft_wrap=True)


MEASURE = "measure"
benches = typer.Typer(
    cls=default_to(MEASURE),
    rich_markup_mode="markdown",
    help="Measure the speed of speculation, and check that the text is the same.",
)
benches.command(MEASURE, epilog=EPILOG)(bench)
benches.command()(inflate)

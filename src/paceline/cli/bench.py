"""`paceline bench`: plain and speculative decoding side by side."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.bench.contender import Contender, EngineContender
from paceline.bench.default_prompts import DEFAULT_PROMPTS
from paceline.bench.openai_server import connect
from paceline.bench.presets import DEFAULT, PRESETS, find_preset
from paceline.bench.profiling.contender import ProfiledContender
from paceline.bench.profiling.profile import Profile, RoundTimes, profile
from paceline.bench.profiling.recorder import Recorder
from paceline.bench.prompts import load_prompts, select
from paceline.bench.report import Measured, Report
from paceline.bench.runner import Workload, compare
from paceline.cli import console
from paceline.cli.bar import counting_bar
from paceline.cli.bench_tables import print_report
from paceline.cli.models import loaded
from paceline.cli.options import ENGINE, with_settings
from paceline.cli.profile_tables import print_profiles
from paceline.core.clock import WallClock
from paceline.core.errors import InvalidRequest
from paceline.core.sampling import SamplingParams
from paceline.server.config.config import ServerConfig

if TYPE_CHECKING:
    from paceline.engine.llm import LLM

EPILOG = "Presets:\n\n" + "\n".join(f"- **{preset.name}**: {preset.about}" for preset in PRESETS.values())


@with_settings(ENGINE)
def bench(
    config: ServerConfig,
    prompts: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help="Lines of JSON with `prompt`, `question`, `turns` or `messages`, and a `category`. None: a built-in set.",
        ),
    ] = None,
    preset: Annotated[str, typer.Option(help="A scenario, from the list below.")] = DEFAULT.name,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at a time.", show_default="the preset's")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of an answer.", show_default="the preset's")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", show_default="the preset's")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the first prompt; the next has the next one.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts at the most, of all categories in turn.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw speeds and alphas.")
    ] = None,
    profile_file: Annotated[
        Path | None,
        typer.Option("--profile", metavar="FILE.png", help="Show and draw where a round's time goes."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="URL", help="Measure this OpenAI-compatible server too, over HTTP.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="For that server.", show_envvar=True, show_default=False)
    ] = None,
) -> None:
    """Measure what speculation brings on your prompts, and that the text stays the same.

    The same requests run plainly and speculatively, in turns. Status 1: some text was different. `paceline bench inflate`
    makes a large target out of a small model.
    """
    chosen = find_preset(preset)
    workload = Workload(
        prompts=select(load_prompts(prompts), limit=limit)
        if prompts
        else select(DEFAULT_PROMPTS, chosen.categories, limit),
        sampling=SamplingParams(
            **{**chosen.sampling, "max_tokens": tokens or chosen.tokens, "seed": seed}
            | ({} if temperature is None else {"temperature": temperature})
        ),
        concurrency=concurrency or chosen.concurrency,
        system=chosen.system,
    )
    for file in (json_file, plot_file, profile_file):  # now, not after minutes of measuring
        if file is not None and not file.parent.is_dir():
            raise InvalidRequest(f"cannot write {file}: there is no folder {file.parent}", field="file")
    with loaded(config.engine) as llm:
        recorder = None if profile_file is None else Recorder(llm.engine, WallClock())
        contenders = asyncio.run(_measure(llm, workload, against, api_key, recorder))
        profiles = [] if recorder is None else _profiles(recorder, llm)
    report = Report(_about(config, chosen.name, prompts, workload), contenders)
    print_report(report, console.out)
    if profiles:
        print_profiles(profiles, console.out)
    if json_file is not None:
        figures = report.to_json() | ({"profiles": [one.to_json() for one in profiles]} if profiles else {})
        json_file.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    if plot_file is not None:
        from paceline.bench.plot import plot

        plot(report, plot_file)
    if profile_file is not None and profiles:
        from paceline.bench.profiling.plot import plot_profiles

        plot_profiles(profiles, str(report.about["title"]), profile_file)
    if contenders[1].differences:  # a server compared with may be another model
        raise typer.Exit(1)


async def _measure(
    llm: "LLM", workload: Workload, against: str | None, api_key: str | None, recorder: Recorder | None
) -> tuple[Measured, ...]:
    clock = WallClock()
    async with AsyncExitStack() as stack:
        contenders: list[Contender] = [
            EngineContender("plain", llm, False, clock),
            EngineContender("speculative", llm, True, clock),
        ]
        if recorder is not None:
            stack.enter_context(recorder)
            contenders = [ProfiledContender(contender, recorder) for contender in contenders]
        if against is not None:
            contenders.append(await stack.enter_async_context(connect(against, api_key, clock)))
        bar = stack.enter_context(counting_bar())
        task = bar.add_task("conversations", total=len(workload.prompts) * len(contenders))
        return await compare(contenders, workload, clock, lambda done: bar.advance(task, done))


def _profiles(recorder: Recorder, llm: "LLM") -> list[Profile]:
    """Of rounds that only decode, one profile a contender."""
    from paceline.bench.profiling.bandwidth import copy_bandwidth

    bandwidth = copy_bandwidth(llm.engine.runner.device, WallClock())
    rounds: dict[str, list[RoundTimes]] = {}
    for one in recorder.rounds:
        if one.is_decode:
            rounds.setdefault(one.label, []).append(one.times)
    found = (profile(name, times, bandwidth) for name, times in rounds.items())
    return [one for one in found if one is not None]


def _about(config: ServerConfig, preset: str, prompts: Path | None, workload: Workload) -> dict[str, Any]:
    from paceline.engine.build import draft_of

    engine, sampling = config.engine, workload.sampling
    draft = draft_of(engine)
    title = (
        f"{engine.model}{f' with draft {draft}' if draft else ''}, temperature {sampling.temperature:g}, "
        f"{workload.concurrency} at a time, up to {sampling.max_tokens} tokens"
    )
    return {
        "title": title,
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

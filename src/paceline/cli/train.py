"""`paceline train`, `paceline export` and `paceline learn`: train drafts for a target.

`train` trains a draft on text that the target generates, `export` writes an EAGLE head for other engines, and `learn` trains a
draft that learns from the traffic of a server. `add_plan` makes the fields of a plan options of a command.
"""

import inspect
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import MISSING, fields, replace
from pathlib import Path
from types import GenericAlias, TracebackType
from typing import Annotated, Any, get_args, get_type_hints

import typer
from rich.markdown import Markdown
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.cli import console
from paceline.cli.options import default_to
from paceline.core.clock import WallClock
from paceline.tools.learn import Lineage, TrialResult, VersionFolder
from paceline.tools.progress import PlainProgress, stop_on_interrupt
from paceline.tools.train import LearnPlan, TrainPlan


def add_plan(plan: type, arguments: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per field of a dataclass, whose annotations are help texts; `arguments` are positional."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = _parameters(plan, arguments)
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _parameters(plan: Any, arguments: Sequence[str]) -> list[inspect.Parameter]:
    hints = get_type_hints(plan, include_extras=True)
    parameters = []
    for entry in fields(plan):
        hint, message = get_args(hints[entry.name])
        default = inspect.Parameter.empty if entry.default is MISSING else entry.default
        many = default == ()
        how = typer.Argument(help=message) if entry.name in arguments else typer.Option(help=message)
        parameters.append(
            inspect.Parameter(
                entry.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=[] if many else default,
                annotation=Annotated[GenericAlias(list, get_args(hint)[:1]) if many else hint, how],
            )
        )
    return parameters


@add_plan(TrainPlan, arguments=("kind",))
def train(**options: Any) -> None:
    """Train a draft for a target: an EAGLE head, Medusa heads, or a small distilled model.

    The target generates the training text. The same command resumes an interrupted training.
    """
    from paceline.tools.progress import INTERRUPTED, stop_on_interrupt
    from paceline.tools.train import table
    from paceline.tools.train import train as run

    plan = TrainPlan(**options | {"prompts": tuple(options["prompts"])})
    clock = WallClock()
    shown = ProgressBar() if console.err.is_terminal else nullcontext(PlainProgress(clock))
    with shown as progress, stop_on_interrupt(progress.note) as stop:
        record = run(plan, shlex.join(["paceline", *sys.argv[1:]]), clock, progress, stop)
    if record is None:
        raise typer.Exit(INTERRUPTED)
    console.out.print(Markdown(table(record.evaluated or record.held_out, record.nodes)))
    console.err.print(f"{plan.out} holds the draft and its card.")


class ProgressBar:
    """Progress on a terminal."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[message]}"),
            console=console.err,
        )
        self._task = self._bar.add_task("starting", total=1.0, message="")

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, stage: str) -> None:
        self._bar.reset(self._task, description=stage, message="")

    def show(self, done: float, message: str) -> None:
        self._bar.update(self._task, completed=done, message=message)

    def note(self, message: str) -> None:
        self._bar.console.print(message)


def export(
    draft: Annotated[str, typer.Argument(help="EAGLE head of `paceline train`: a folder or a name.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder; must not exist.")],
    model: Annotated[str, typer.Option(help="Target of the head: a folder, a GGUF file or a name.")] = "smollm2",
    speculative_tokens: Annotated[int, typer.Option(min=1, help="Depth that the folder names as its default.")] = 3,
) -> None:
    """Write an EAGLE head in the format of `speculators`, which vLLM loads."""
    from paceline.tools.train import export_head  # imports torch

    export_head(draft, model, out, speculative_tokens)
    console.out.print(f"{out} holds the head in the format of speculators.", soft_wrap=True)


RUN = "run"
KEY = "PACELINE_ADMIN_KEY"
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the learned versions.")]

learn = typer.Typer(cls=default_to(RUN), rich_markup_mode="markdown", no_args_is_help=True)


@learn.callback()
def group() -> None:
    """Train a draft further on what a server generates, and offer it to the server.

    `paceline learn SERVER_URL --draft DRAFT --out FOLDER` runs until Ctrl-C. The server needs `learning: true`.
    """


@add_plan(LearnPlan, arguments=("server",))
def run(**options: Any) -> None:
    """Learn from a running server until Ctrl-C, SIGTERM or the end of --minutes.

    A version is kept if it is better on held-out samples, and then under load by measured goodput. The text never changes.
    """
    from paceline.tools.learn import learn as learn_from

    plan = LearnPlan(**options)
    plan = replace(plan, key=plan.key or os.environ.get(KEY))
    clock = WallClock()
    shown = ProgressBar() if console.err.is_terminal else nullcontext(PlainProgress(clock))
    with shown as progress, stop_on_interrupt(progress.note) as stop:
        learn_from(plan, shlex.join(["paceline", *_without_key(sys.argv[1:])]), clock, progress, stop)
    console.out.print(_table(VersionFolder(plan.out).lineages()))


learn.command(RUN)(run)


@learn.command()
def status(folder: Folder) -> None:
    """Show what the learner does and all versions."""
    versions = VersionFolder(folder)
    state, activity = versions.state(), versions.activity()
    console.out.print(f"server: {state.server}", markup=False)
    console.out.print(f"draft: {versions.draft(versions.current())}", markup=False, soft_wrap=True)
    if state.is_paused:
        console.out.print("paused; `paceline learn resume` continues")
    if activity is not None:
        console.out.print(
            f"{activity.time}: {activity.doing}; {activity.samples} samples, {activity.new_tokens:,} new tokens of "
            f"{activity.tokens_wanted:,}",
            markup=False,
            soft_wrap=True,
        )
    console.out.print(_table(versions.lineages()))


@learn.command()
def pause(folder: Folder) -> None:
    """Stop reading samples and training. The server keeps its draft."""
    VersionFolder(folder).pause(True)
    console.out.print(f"{folder} is paused", markup=False, soft_wrap=True)


@learn.command()
def resume(folder: Folder) -> None:
    """Continue after `pause`."""
    VersionFolder(folder).pause(False)
    console.out.print(f"{folder} continues", markup=False, soft_wrap=True)


@learn.command()
def rollback(folder: Folder) -> None:
    """Refuse the current version and return to the one before it.

    The learner offers that one to the server, now or when it runs again, and trains from it.
    """
    versions = VersionFolder(folder)
    version, current = versions.roll_back()
    console.out.print(f"version {version} is refused; current: {versions.draft(current)}", markup=False, soft_wrap=True)


def _table(lineages: list[Lineage]) -> Table | str:
    if not lineages:
        return "no version yet"
    table = Table("version", "parent", "time", "samples", "alpha", "tokens per round", "status", "reason")
    for lineage in lineages:
        table.add_row(
            f"{lineage.version}",
            f"{lineage.parent}",
            lineage.time,
            f"{lineage.samples}",
            f"{lineage.alpha_before:.3f} -> {lineage.alpha_after:.3f}",
            f"{lineage.tokens_per_round_before:.2f} -> {lineage.tokens_per_round_after:.2f}",
            lineage.status,
            lineage.note or _reason(lineage.online) or _reason(lineage.offline),
        )
    return table


def _reason(verdict: TrialResult | None) -> str:
    return "" if verdict is None else verdict.reason


def _without_key(arguments: list[str]) -> list[str]:
    """The command without the API key: it is written into cards."""
    kept, is_key = list[str](), False
    for argument in arguments:
        if not is_key and argument != "--key" and not argument.startswith("--key="):
            kept.append(argument)
        is_key = argument == "--key"
    return kept

"""`paceline train`: a draft of one's own."""

import inspect
import shlex
import sys
from contextlib import nullcontext
from dataclasses import MISSING, fields
from types import GenericAlias, TracebackType
from typing import Annotated, Any, get_args, get_type_hints

import typer
from rich.markdown import Markdown
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.cli import console
from paceline.core.clock import WallClock
from paceline.train.plan import TrainPlan
from paceline.train.progress import PlainProgress


def train(**options: Any) -> None:
    """Train a draft for a target: an EAGLE head, Medusa heads, or a small distilled model.

    The target writes the text to learn from. An interrupted training goes on when the same command is given again.
    """
    from paceline.train.card import table
    from paceline.train.interrupt import INTERRUPTED, stop_on_interrupt
    from paceline.train.run import train as run

    plan = TrainPlan(**options | {"prompts": tuple(options["prompts"])})
    clock = WallClock()
    shown = _Bar() if console.err.is_terminal else nullcontext(PlainProgress(clock))
    with shown as progress, stop_on_interrupt(progress.note) as stop:
        record = run(plan, shlex.join(["paceline", *sys.argv[1:]]), clock, progress, stop)
    if record is None:
        raise typer.Exit(INTERRUPTED)
    console.out.print(Markdown(table(record.judged or record.held_out, record.nodes)))
    console.err.print(f"{plan.out} holds the draft, and its card.")


class _Bar:
    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[words]}"),
            console=console.err,
        )
        self._task = self._bar.add_task("starting", total=1.0, words="")

    def __enter__(self) -> "_Bar":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, stage: str) -> None:
        self._bar.reset(self._task, description=stage, words="")

    def show(self, done: float, words: str) -> None:
        self._bar.update(self._task, completed=done, words=words)

    def note(self, words: str) -> None:
        self._bar.console.print(words)


def _parameters() -> list[inspect.Parameter]:
    """One option a field of the plan, the kind an argument."""
    hints = get_type_hints(TrainPlan, include_extras=True)
    parameters = []
    for entry in fields(TrainPlan):
        hint, words = get_args(hints[entry.name])
        default = inspect.Parameter.empty if entry.default is MISSING else entry.default
        many = default == ()
        how = typer.Argument(help=words) if entry.name == "kind" else typer.Option(help=words)
        parameters.append(
            inspect.Parameter(
                entry.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=[] if many else default,
                annotation=Annotated[GenericAlias(list, get_args(hint)[:1]) if many else hint, how],
            )
        )
    return parameters


train.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
train.__annotations__ = {parameter.name: parameter.annotation for parameter in _parameters()}

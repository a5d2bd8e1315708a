"""`paceline train`: train a draft for a target."""

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

from paceline.cli.render import console
from paceline.core.clock import WallClock
from paceline.train.plan import TrainPlan
from paceline.train.progress import PlainProgress


def train(**options: Any) -> None:
    """Train a draft for a target: an EAGLE head, Medusa heads, or a small distilled model.

    The target generates the training text. The same command resumes an interrupted training.
    """
    from paceline.train.card import table
    from paceline.train.progress import INTERRUPTED, stop_on_interrupt
    from paceline.train.run import train as run

    plan = TrainPlan(**options | {"prompts": tuple(options["prompts"])})
    clock = WallClock()
    shown = _Bar() if console.err.is_terminal else nullcontext(PlainProgress(clock))
    with shown as progress, stop_on_interrupt(progress.note) as stop:
        record = run(plan, shlex.join(["paceline", *sys.argv[1:]]), clock, progress, stop)
    if record is None:
        raise typer.Exit(INTERRUPTED)
    console.out.print(Markdown(table(record.evaluated or record.held_out, record.nodes)))
    console.err.print(f"{plan.out} holds the draft and its card.")


class _Bar:
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

    def __enter__(self) -> "_Bar":
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


def _parameters() -> list[inspect.Parameter]:
    """One option per field of the plan; `kind` is an argument."""
    hints = get_type_hints(TrainPlan, include_extras=True)
    parameters = []
    for entry in fields(TrainPlan):
        hint, message = get_args(hints[entry.name])
        default = inspect.Parameter.empty if entry.default is MISSING else entry.default
        many = default == ()
        how = typer.Argument(help=message) if entry.name == "kind" else typer.Option(help=message)
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

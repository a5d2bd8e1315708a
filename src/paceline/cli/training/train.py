"""`paceline train`: train a draft for a target."""

import shlex
import sys
from contextlib import nullcontext
from types import TracebackType
from typing import Any

import typer
from rich.markdown import Markdown
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.cli.render import console
from paceline.cli.training.plan_options import add_plan
from paceline.core.clock import WallClock
from paceline.train.plan import TrainPlan
from paceline.train.progress import PlainProgress


@add_plan(TrainPlan, arguments=("kind",))
def train(**options: Any) -> None:
    """Train a draft for a target: an EAGLE head, Medusa heads, or a small distilled model.

    The target generates the training text. The same command resumes an interrupted training.
    """
    from paceline.train.card import table
    from paceline.train.progress import INTERRUPTED, stop_on_interrupt
    from paceline.train.run import train as run

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

"""`paceline train` and `paceline export`: train a draft for a target, and write an EAGLE head for other engines."""

import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

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


def export(
    draft: Annotated[str, typer.Argument(help="EAGLE head of `paceline train`: a folder or a name.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder; must not exist.")],
    model: Annotated[str, typer.Option(help="Target of the head: a folder, a GGUF file or a name.")] = "smollm2",
    speculative_tokens: Annotated[int, typer.Option(min=1, help="Depth that the folder names as its default.")] = 3,
) -> None:
    """Write an EAGLE head in the format of `speculators`, which vLLM loads."""
    from paceline.train.speculators import export_head  # imports torch

    export_head(draft, model, out, speculative_tokens)
    console.out.print(f"{out} holds the head in the format of speculators.", soft_wrap=True)

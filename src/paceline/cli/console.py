"""Terminal output, progress, and a model loaded for one command."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column

from paceline.cli.start_display import StartDisplay
from paceline.core.config import EngineConfig
from paceline.core.machine import reporting_to
from paceline.model_files.tokenizer import check_pair

if TYPE_CHECKING:
    from paceline.engine.start import LLM


NUMBERS = re.compile(r"[\d.+-]+")

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def fail(message: str) -> None:
    """Print an error as one red line on standard error."""
    err.print(f"error: {message}", style="bold red", markup=False, soft_wrap=True)


def counting_bar() -> Progress:
    """A progress bar for counted work. It disappears at the end."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
    )


def share_bar() -> Progress:
    """A progress bar for work of known shares, with the field `left` of its task. It disappears at the end."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%, {task.fields[left]}"),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )


@contextmanager
def waiting(text: str) -> Iterator[Callable[[str], None]]:
    """Shows on standard error what a command waits for. The block calls the yielded function with a new text.

    On a terminal it is one line with the time since the start, which disappears at the end. Elsewhere each new text is a line
    of its own, if it differs in more than numbers.
    """
    described = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    shown = text
    with Progress(
        SpinnerColumn(), described, TimeElapsedColumn(), console=err, transient=True, disable=not err.is_terminal
    ) as progress:
        task = progress.add_task(text, total=None)

        def show(new: str) -> None:
            nonlocal shown
            if not err.is_terminal and NUMBERS.sub("", new) != NUMBERS.sub("", shown):
                err.print(new, markup=False, soft_wrap=True)
            progress.update(task, description=new)
            shown = new

        yield show


def describe_seconds(seconds: float) -> str:
    """A time for people: `40 s`, `3 min`."""
    return f"{seconds:.0f} s" if seconds < 100.0 else f"{seconds / 60.0:.0f} min"


@contextmanager
def loaded(config: EngineConfig) -> Iterator["LLM"]:
    """Load a model while its phases are shown, and close the model when the block ends."""
    check_pair(config.model, config.draft)
    with StartDisplay(err, "import torch") as display, reporting_to(display.report):
        from paceline.engine.start import LLM  # imports torch, which takes seconds

        llm = LLM(**asdict(config))
    with llm:
        yield llm

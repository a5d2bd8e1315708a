"""Terminal output, progress, and a model loaded for one command."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.core.config import EngineConfig
from paceline.model_files.tokenizer import check_pair

if TYPE_CHECKING:
    from paceline.engine.start import LLM


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


def describe_seconds(seconds: float) -> str:
    """A time for people: `40 s`, `3 min`."""
    return f"{seconds:.0f} s" if seconds < 100.0 else f"{seconds / 60.0:.0f} min"


@contextmanager
def loaded(config: EngineConfig) -> Iterator["LLM"]:
    """Load a model behind a spinner, and close the model when the block ends."""
    check_pair(config.model, config.draft)
    with err.status(describe(config)):
        from paceline.engine.start import LLM  # imports torch, which takes seconds

        llm = LLM(**asdict(config))
    with llm:
        yield llm


def describe(config: EngineConfig) -> str:
    draft = f" with draft {config.draft}" if config.draft not in (None, "none", "auto") else ""
    return f"loading {config.model}{draft} and timing this machine"

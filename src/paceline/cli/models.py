"""A model for the length of a command."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from paceline.cli import console
from paceline.core.config import EngineConfig

if TYPE_CHECKING:
    from paceline.engine.llm import LLM


@contextmanager
def loaded(config: EngineConfig) -> Iterator["LLM"]:
    """Loads with a spinner, closes at the end."""
    with console.err.status(describe(config)):
        from paceline.engine.llm import LLM  # brings torch along: seconds of their own

        llm = LLM(**asdict(config))
    with llm:
        yield llm


def describe(config: EngineConfig) -> str:
    draft = f" with draft {config.draft}" if config.draft not in (None, "none", "auto") else ""
    return f"loading {config.model}{draft} and timing this machine"

"""A model for the length of a command."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from paceline.cli import console
from paceline.core.config import EngineConfig
from paceline.models.hub import pick_draft

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
    name = pick_draft(config.draft, config.model)
    draft = f" with draft {name}" if name else ""
    return f"loading {config.model}{draft} and timing this machine"

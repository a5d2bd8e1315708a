"""Paceline: speculative decoding for LLM serving, faster and not a word different."""

from typing import TYPE_CHECKING, Any

from paceline.core.errors import PacelineError
from paceline.core.request import SamplingParams, SpeculationParams
from paceline.core.version import VERSION as __version__

if TYPE_CHECKING:
    from paceline.engine.start import LLM

__all__ = ["LLM", "PacelineError", "SamplingParams", "SpeculationParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":  # imported on first use, because it imports torch
        from paceline.engine.start import LLM

        return LLM
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")

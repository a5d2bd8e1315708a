"""Prompts and arrival times of benchmark runs."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.tools.prompts.prompts import (
        DEFAULT,
        DEFAULT_PROMPTS,
        PRESETS,
        AnswerTimes,
        Arrival,
        BenchPrompt,
        Preset,
        find_preset,
        load_prompts,
        select,
    )

__all__ = [
    "DEFAULT",
    "DEFAULT_PROMPTS",
    "PRESETS",
    "AnswerTimes",
    "Arrival",
    "BenchPrompt",
    "Preset",
    "find_preset",
    "load_prompts",
    "select",
]

__getattr__ = lazy_face(
    __name__,
    {
        "prompts": "AnswerTimes Arrival BenchPrompt DEFAULT DEFAULT_PROMPTS PRESETS Preset find_preset load_prompts select"
    },
)

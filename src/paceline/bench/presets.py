"""Scenarios to measure: what kind of traffic, how it is sampled, how long the answers are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from paceline.bench.default_prompts import SUPPORT_SYSTEM
from paceline.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Preset:
    name: str
    about: str
    categories: tuple[str, ...] | None
    """Of the built-in prompts; None takes all. A prompt file is used whole."""
    tokens: int
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams`."""
    concurrency: int = 1
    system: str | None = None


DEFAULT = Preset("default", "a bit of everything, greedily, one request at a time", None, 96, {"temperature": 0.0})

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            DEFAULT,
            Preset(
                "support-chat",
                "billing and outage tickets behind one long system prompt, at temperature 0.7, over several turns",
                ("support",),
                96,
                {"temperature": 0.7},
                system=SUPPORT_SYSTEM,
            ),
            Preset("code", "functions and edits of given code, greedily", ("code",), 160, {"temperature": 0.0}),
            Preset(
                "extraction",
                "summaries and facts taken from a given text: answers repeat their prompt",
                ("summarisation", "extraction"),
                96,
                {"temperature": 0.0},
            ),
            Preset(
                "creative",
                "stories and verse at temperature 1: the hardest to guess",
                ("creative",),
                128,
                {"temperature": 1.0},
            ),
            Preset(
                "json",
                "answers held to a JSON object by a grammar",
                ("json",),
                96,
                {"temperature": 0.0, "json_schema": {"type": "object"}},
            ),
            Preset(
                "low-acceptance",
                "legacy languages that a draft knows little about: speculation must not cost anything here",
                ("legacy",),
                128,
                {"temperature": 0.7},
            ),
            Preset(
                "public-api",
                "everything at once, eight requests at a time, sampled as a public API would be",
                None,
                96,
                {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
                concurrency=8,
            ),
        )
    }
)


def find_preset(name: str) -> Preset:
    if name not in PRESETS:
        raise InvalidRequest(f"no preset {name!r}; choose from: {', '.join(PRESETS)}", field="preset")
    return PRESETS[name]

"""Prompts from a file of JSON lines, one conversation each.

A line has `prompt` or `question` (one user turn), `turns` (several, as in Spec-Bench) or `messages` (user messages only), and
optionally `category`. Other keys are ignored.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """The user turns of one conversation."""

    turns: tuple[str, ...]
    """User messages. Each is answered before the next is sent."""
    category: str = "default"


def load_prompts(path: Path) -> list[BenchPrompt]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidRequest(
            f"cannot read the prompts in {path}: {why}. Give a file with one JSON object per line, such as "
            '{"prompt": "Why is the sky blue?"}',
            field="prompts",
        ) from error
    prompts = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InvalidRequest(f"{path} holds no prompts: give one JSON object per line", field="prompts")
    return prompts


def select(
    prompts: Sequence[BenchPrompt], categories: Iterable[str] | None = None, limit: int | None = None
) -> list[BenchPrompt]:
    """The prompts of `categories`, or all prompts. They are at most `limit`, taken from all categories in turn."""
    if categories is not None:
        wanted = set(categories)
        known = dict.fromkeys(prompt.category for prompt in prompts)
        prompts = [prompt for prompt in prompts if prompt.category in wanted]
        if not prompts:
            raise InvalidRequest(
                f"no prompt is of category {', '.join(sorted(wanted))}; there are: {', '.join(known)}", field="category"
            )
    if limit is None:
        return list(prompts)
    place: dict[str, int] = {}
    ranked = []
    for i, prompt in enumerate(prompts):
        rank = place[prompt.category] = place.get(prompt.category, -1) + 1
        ranked.append((rank, i))
    kept = sorted(i for _, i in sorted(ranked)[:limit])
    return [prompts[i] for i in kept]


def _parse(line: str, where: str) -> BenchPrompt:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{where} is not JSON: {error}", field="prompts") from None
    turns = _turns(entry) if isinstance(entry, dict) else None
    if isinstance(turns, str):
        turns = [turns]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise InvalidRequest(
            f"{where} needs `prompt` or `question` (a text), `turns` (a list of texts), or `messages`", field="prompts"
        )
    return BenchPrompt(tuple(turns), str(entry.get("category", "default")))


def _turns(entry: dict[str, Any]) -> Any:
    for key in ("turns", "prompt", "question"):
        if key in entry:
            return entry[key]
    messages = entry.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None
    return [message.get("content") for message in messages if message.get("role") == "user"]

"""What the target is asked to write: a script for every row of text.

Prompts come from a file of the traffic's own, or begin as `kinds` has it and are finished by the target. Some of each
are held out: no draft is trained on them.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import InvalidRequest
from paceline.models.tokenizer.tokenizer import Tokenizer
from paceline.train.data.kinds import KINDS, Beginning
from paceline.train.data.request_log import RequestLog
from paceline.train.data.turns import Turns

FREE, HELD = -1, -2
"""In a script: the target writes here; the target writes here and may not end its turn."""
HELD_OUT_EVERY = 16
"""Of the prompts of a file, one in so many is for evaluation only."""


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    category: str


@dataclass(frozen=True, slots=True)
class Script:
    kind: str
    ids: tuple[int, ...]
    """Token ids, or FREE, or HELD; free from the end on."""


def read_prompts(path: Path, log: RequestLog) -> list[Prompt]:
    """One JSON object a line with `turns`, `prompt`, `question`, or `messages`, or the log of a server; only what the user says
    first is used."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read the prompts in {path}: {error}", field="prompts") from error
    prompts = []
    for i, line in enumerate(lines, 1):
        if line.strip():
            prompts += _prompts(line, f"{path.name}:{i}", path.stem, log)
    if not prompts:
        raise InvalidRequest(
            f"{path} holds no prompts: give one JSON object a line, or the log of a server with `log_requests: text`",
            field="prompts",
        )
    return prompts


def split(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """(to train on, held out), the same for the same file. What is asked again counts once, or it would be in both."""
    prompts = list({prompt.text: prompt for prompt in prompts}.values())
    return (
        [prompt for i, prompt in enumerate(prompts) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1],
        [prompt for i, prompt in enumerate(prompts) if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1],
    )


class Corpus:
    """An endless, repeatable supply of scripts."""

    def __init__(self, tokenizer: Tokenizer, turns: Turns, prompts: Sequence[Prompt], share: float) -> None:
        """`share` of the scripts are prompts, where there are any; the rest are of the built-in kinds."""
        self._tokenizer, self._turns = tokenizer, turns
        self._prompts, self._share = prompts, share if prompts else 0.0

    def scripts(self, seed: int) -> Iterator[Script]:
        draw = random.Random(seed)
        kinds, shares = tuple(KINDS), tuple(KINDS.values())
        while True:
            if not self._turns.is_chat and not self._prompts:
                yield Script("text", self._turns.opening)
            elif not self._turns.is_chat or draw.random() < self._share:
                yield self.script_of(draw.choice(self._prompts))
            else:
                yield self._begin(draw.choices(kinds, shares)[0](draw))

    def script_of(self, prompt: Prompt) -> Script:
        return self._begin(Beginning(prompt.category, (prompt.text,), True))

    def _begin(self, beginning: Beginning) -> Script:
        ids = list(self._turns.opening)
        for piece in beginning.pieces:
            ids += [HELD] * piece if isinstance(piece, int) else self._tokenizer.encode(piece, add_special=False)
        if beginning.is_whole:
            ids += self._turns.to_answer[:1]
        return Script(beginning.kind, tuple(ids))


def _prompts(line: str, where: str, category: str, log: RequestLog) -> list[Prompt]:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{where} is not JSON: {error}", field="prompts") from None
    if log.is_line(entry):
        return [Prompt(text, str(entry.get("category", category))) for text in log.prompts(entry)]
    text = _text(entry) if isinstance(entry, Mapping) else None
    if not text:
        raise InvalidRequest(f"{where} needs `prompt`, `question`, `turns` or `messages`", field="prompts")
    return [Prompt(text, str(entry.get("category", category)))]


def _text(entry: Mapping[str, Any]) -> str | None:
    said = entry.get("turns") or entry.get("prompt") or entry.get("question")
    if said is None:
        messages = entry.get("messages") or ()
        said = [m.get("content") for m in messages if isinstance(m, Mapping) and m.get("role") == "user"]
    if isinstance(said, list):
        said = said[0] if said else None
    return said if isinstance(said, str) else None

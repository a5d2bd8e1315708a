"""Scripts for the training text: one per row, from prompt files or from built-in kinds of requests.

Some prompts of every file are held out: no draft is trained on them.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import InvalidRequest
from paceline.models.tokenizer.tokenizer import Tokenizer
from paceline.train.data.request_kinds import KINDS, PromptStart
from paceline.train.data.turn_tokens import TurnTokens


class RequestLog:
    """Reads prompts from a server's log. With `log_requests: text` the log holds every rendered prompt."""

    def __init__(self, tokenizer: Tokenizer, turns: TurnTokens) -> None:
        self._header = tokenizer.decode(turns.to_user, skip_special=False).lstrip() if turns.is_chat else ""
        self._end = tokenizer.decode(turns.to_answer[:1], skip_special=False) if turns.is_chat else ""

    @staticmethod
    def is_line(entry: Any) -> bool:
        return isinstance(entry, Mapping) and "logger" in entry and "message" in entry

    def prompts(self, entry: Mapping[str, Any]) -> list[str]:
        """The first user message of every prompt in this line. Most lines have no such message."""
        return [text for prompt in entry.get("prompt", ()) if (text := self._first_message(prompt))]

    def _first_message(self, prompt: str) -> str:
        """The first user turn, or the whole prompt if it has no turns."""
        _, header, rest = prompt.partition(self._header) if self._header else ("", "", "")
        return (rest.partition(self._end)[0] if header else prompt).strip()


GENERATE, NO_END = -1, -2
"""Entries of a script. At `GENERATE` the target generates until the next user turn. At `NO_END` it generates a token that does
not end its turn."""
ANSWER_TOKENS = 128
"""Expected length of an answer."""
TRIES = 8
"""Draws of a further prompt that fits into a row."""
HELD_OUT_EVERY = 16
"""One in this many prompts of a file is held out."""


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """The first user message of a request, and its category."""

    text: str
    category: str


@dataclass(frozen=True, slots=True)
class Script:
    """One row of text to generate."""

    kind: str
    ids: tuple[int, ...]
    """Token ids, GENERATE or NO_END. GENERATE follows after the last entry."""


def read_prompts(path: Path, log: RequestLog) -> list[TrainingPrompt]:
    """The first user message of every line: JSON with `turns`, `prompt`, `question` or `messages`, or a server's log."""
    try:
        lines = path.read_text("utf-8").split("\n")  # splitlines() also splits at U+2028, which JSON may contain
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidRequest(
            f"cannot read the prompts in {path}: {why}. Give a file with one JSON object per line, such as "
            '{"prompt": "Why is the sky blue?"}, or the log of a server',
            field="prompts",
        ) from error
    prompts = []
    for i, line in enumerate(lines, 1):
        if line.strip():
            prompts += _prompts(line, f"{path.name}:{i}", path.stem, log)
    if not prompts:
        raise InvalidRequest(
            f"{path} holds no prompts: give one JSON object per line, or the log of a server with `log_requests: text`",
            field="prompts",
        )
    return prompts


def split(prompts: Sequence[TrainingPrompt]) -> tuple[list[TrainingPrompt], list[TrainingPrompt]]:
    """(training prompts, held-out prompts), the same for the same file. Duplicates count once, so that no prompt is in the two
    lists."""
    prompts = list({prompt.text: prompt for prompt in prompts}.values())
    return (
        [prompt for i, prompt in enumerate(prompts) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1],
        [prompt for i, prompt in enumerate(prompts) if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1],
    )


class Corpus:
    """An endless, reproducible sequence of scripts."""

    def __init__(
        self, tokenizer: Tokenizer, turns: TurnTokens, prompts: Sequence[TrainingPrompt], share: float, length: int = 0
    ) -> None:
        """`share` of the scripts use `prompts`, if there are any. The remaining scripts are of built-in kinds. A script has as
        many prompts as `length` tokens hold with their answers, at least one."""
        self._tokenizer, self._turns, self._length = tokenizer, turns, length
        self._prompts, self._share = prompts, share if prompts else 0.0
        self._scripts = dict[TrainingPrompt, Script]()

    def scripts(self, seed: int) -> Iterator[Script]:
        draw = random.Random(seed)
        kinds, shares = tuple(KINDS), tuple(KINDS.values())
        while True:
            if not self._turns.is_chat and not self._prompts:
                yield Script("text", self._turns.opening)
            elif not self._turns.is_chat or draw.random() < self._share:
                yield self._script_of_prompts(draw)
            else:
                yield self._script(draw.choices(kinds, shares)[0](draw))

    def script_for(self, prompt: TrainingPrompt) -> Script:
        """The script of one prompt, encoded once."""
        if prompt not in self._scripts:
            self._scripts[prompt] = self._script(PromptStart(prompt.category, (prompt.text,), True))
        return self._scripts[prompt]

    def _script_of_prompts(self, draw: random.Random) -> Script:
        """Prompts of any category in sequence. The kind is that of the first prompt."""
        first = self.script_for(draw.choice(self._prompts))
        ids, opening = list(first.ids), len(self._turns.opening)
        used = len(ids) + ANSWER_TOKENS
        for _ in range(TRIES if self._turns.is_chat else 0):
            turn = self.script_for(draw.choice(self._prompts)).ids[opening:]
            if used + len(turn) + ANSWER_TOKENS <= self._length:
                ids += [GENERATE, *turn]
                used += len(turn) + ANSWER_TOKENS
        return Script(first.kind, tuple(ids))

    def _script(self, start: PromptStart) -> Script:
        ids = list(self._turns.opening)
        for piece in start.pieces:
            ids += [NO_END] * piece if isinstance(piece, int) else self._tokenizer.encode(piece, add_special=False)
        if start.ends_turn:
            ids += self._turns.to_answer[:1]
        return Script(start.kind, tuple(ids))


def _prompts(line: str, where: str, category: str, log: RequestLog) -> list[TrainingPrompt]:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{where} is not JSON: {error}", field="prompts") from None
    if log.is_line(entry):
        return [TrainingPrompt(text, str(entry.get("category", category))) for text in log.prompts(entry)]
    text = _text(entry) if isinstance(entry, Mapping) else None
    if not text:
        raise InvalidRequest(f"{where} needs `prompt`, `question`, `turns` or `messages`", field="prompts")
    return [TrainingPrompt(text, str(entry.get("category", category)))]


def _text(entry: Mapping[str, Any]) -> str | None:
    content = entry.get("turns") or entry.get("prompt") or entry.get("question")
    if content is None:
        messages = entry.get("messages") or ()
        content = [m.get("content") for m in messages if isinstance(m, Mapping) and m.get("role") == "user"]
    if isinstance(content, list):
        content = content[0] if content else None
    return content if isinstance(content, str) else None

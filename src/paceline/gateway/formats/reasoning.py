"""Splits the reasoning before an answer from the answer.

Reasoning is between two markers. The prompt may end with the first of them; the answer then begins with reasoning.
"""

from dataclasses import dataclass

from paceline.gateway.formats.pieces import AnswerParser, Piece, Reasoning, first_marker, num_partial


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models writes its reasoning."""

    name: str
    start: str
    end: str
    interrupts: tuple[str, ...] = ()
    """Starts of calls that end unclosed reasoning. They are longer than a marker that is quoted in it."""

    @property
    def markers(self) -> tuple[str, ...]:
        return self.start.strip(), self.end.strip()

    def is_open(self, prompt_end: str) -> bool:
        """Whether the answer after this prompt begins inside the reasoning."""
        return prompt_end.rstrip().endswith(self.start.rstrip())


THINK = ReasoningFormat(
    "think", "<think>", "</think>", ('<tool_call>\n{"name"', "<tool_call>\n<function=", "<tool_call><function=")
)
BRACKETS = ReasoningFormat("brackets", "[THINK]", "[/THINK]")
CHANNEL = ReasoningFormat("channel", "<|channel>thought\n", "<channel|>")
GRANITE = ReasoningFormat("granite", "Here is my thought process:", "Here is my response:")


class ReasoningParser:
    """Passes the text after the reasoning on to the parser of the answer."""

    def __init__(self, format_: ReasoningFormat, is_open: bool, answer: AnswerParser) -> None:
        self._format, self._answer = format_, answer
        self._state = "reasoning" if is_open else "start"
        self._held = ""
        self._is_empty = True
        """Whether no reasoning was returned: white space before it is dropped."""

    def push(self, text: str) -> list[Piece]:
        if self._state == "answer":
            return self._answer.push(text)
        self._held += text
        pieces: list[Piece] = []
        if self._state == "start":
            start = self._held.lstrip()
            if not start.startswith(self._format.start):
                if self._format.start.startswith(start):
                    return []
                return self._begin_answer(self._held)
            self._state, self._held = "reasoning", start[len(self._format.start) :]
        if self._state == "reasoning":
            pieces = self._read_reasoning()
        if self._state == "gap":
            pieces += self._skip_gap()
        return pieces

    def flush(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._state == "reasoning":
            pieces += self._reasoning(self._held.rstrip())
        elif self._state == "start":
            pieces += self._answer.push(self._held)
        return pieces + self._answer.flush()

    def _read_reasoning(self) -> list[Piece]:
        ends = (self._format.end, *self._format.interrupts)
        found = first_marker(self._held, ends)
        if found is None:
            decided = self._held[: len(self._held) - num_partial(self._held, ends)].rstrip()
            self._held = self._held[len(decided) :]
            return self._reasoning(decided)
        at, marker = found
        pieces = self._reasoning(self._held[:at].rstrip())
        self._state = "gap"
        self._held = self._held[at + len(marker) if marker == self._format.end else at :]
        return pieces

    def _reasoning(self, text: str) -> list[Piece]:
        text = text.lstrip() if self._is_empty else text
        self._is_empty = self._is_empty and not text
        return [Reasoning(text)] if text else []

    def _skip_gap(self) -> list[Piece]:
        """White space between reasoning and answer belongs to neither."""
        self._held = self._held.lstrip()
        return self._begin_answer(self._held) if self._held else []

    def _begin_answer(self, text: str) -> list[Piece]:
        self._state, self._held = "answer", ""
        return self._answer.push(text)


class TextParser:
    """For an answer without calls."""

    def push(self, text: str) -> list[Piece]:
        return [text] if text else []

    def flush(self) -> list[Piece]:
        return []

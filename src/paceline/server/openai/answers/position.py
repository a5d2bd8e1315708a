"""The position of a client in a resumable stream, as the id of the last event that it has seen."""

import re
from dataclasses import dataclass

from paceline.core.output import StepOutput
from paceline.server.openai.errors import BadRequest

HEADER = "last-event-id"
PATTERN = re.compile(r"((?:chatcmpl|cmpl)-[0-9a-f]{24}):((?:\d{1,9}f?\.)*\d{1,9}f?)")


class StreamPosition:
    """Counts the tokens of each choice. An id is `ANSWER:COUNT.COUNT`; `f` marks a finished choice."""

    def __init__(self, num_choices: int) -> None:
        self._counts, self._finished = [0] * num_choices, [False] * num_choices

    def add(self, output: StepOutput) -> None:
        self._counts[output.choice] += len(output.tokens)
        self._finished[output.choice] |= output.finish_reason is not None

    def event_id(self, answer_id: str) -> str:
        counts = zip(self._counts, self._finished, strict=True)
        return f"{answer_id}:{'.'.join(f'{count}f' if is_finished else str(count) for count, is_finished in counts)}"


@dataclass(frozen=True, slots=True)
class ChoicePosition:
    num_tokens: int
    is_finished: bool


@dataclass(frozen=True, slots=True)
class LastEvent:
    """The last event that a client has seen."""

    answer_id: str
    choices: tuple[ChoicePosition, ...]

    @staticmethod
    def parse(text: str) -> "LastEvent":
        match = PATTERN.fullmatch(text)
        if match is None:
            raise BadRequest(
                "Last-Event-ID is not the id of an event of a resumable stream: send the request without it",
                code="invalid_event_id",
            )
        counts = match[2].split(".")
        return LastEvent(
            match[1], tuple(ChoicePosition(int(count.rstrip("f")), count.endswith("f")) for count in counts)
        )

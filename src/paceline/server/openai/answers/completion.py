"""The answer of /v1/completions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.output import StepOutput, TokenLogprobs
from paceline.core.request import Request
from paceline.server.openai.answers.answer import Answer
from paceline.server.openai.answers.logprobs import completion_logprobs


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offset: int = 0
    """Where in the text the next token begins."""
    finish_reason: str | None = None


class CompletionAnswer(Answer):
    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, requests: Sequence[Request], *about: Any) -> None:
        super().__init__(requests, *about)
        self._choices = [_Choice() for request in requests for _ in range(request.sampling.n)]

    def take(self, index: int, output: StepOutput) -> dict[str, Any] | None:
        choice, logprobs = self._choices[index], None
        choice.texts.append(output.text)
        choice.finish_reason = output.finish_reason.value if output.finish_reason else None
        if output.logprobs is not None:
            logprobs = completion_logprobs(output.logprobs, self._tokenizer, choice.offset)
            choice.offset += sum(map(len, logprobs["tokens"]))
            choice.logprobs += output.logprobs
        if not output.text and logprobs is None and choice.finish_reason is None:
            return None
        return {"index": index, "text": output.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def choices(self) -> list[dict[str, Any]]:
        return [
            {
                "index": index,
                "text": "".join(choice.texts),
                "logprobs": completion_logprobs(choice.logprobs, self._tokenizer, 0) if choice.logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(self._choices)
        ]

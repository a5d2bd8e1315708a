"""Responses and chunks of /v1/completions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.output import StepOutput, TokenLogprobs
from paceline.core.request import Request
from paceline.models.tokenizer.tokenizer import Tokenizer
from paceline.server.openai.answers.answer import MIN_LOGPROB, Answer


@dataclass(slots=True)
class _TextChoice:
    """The text of one choice, as far as it is generated."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offset: int = 0
    """Position of the next token in the text."""
    finish_reason: str | None = None


class CompletionAnswer(Answer):
    """The answer of a text completion request."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, requests: Sequence[Request], *context: Any) -> None:
        super().__init__(requests, *context)
        self._choices = [_TextChoice() for request in requests for _ in range(request.sampling.n)]

    def add_to_choice(self, index: int, output: StepOutput) -> dict[str, Any] | None:
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


def completion_logprobs(tokens: Sequence[TokenLogprobs], tokenizer: Tokenizer, offset: int) -> dict[str, Any]:
    """`logprobs` of a choice: parallel lists. `offset` is the position of the first token in the text."""

    def text_of(token: int) -> str:
        return tokenizer.token_bytes(token).decode("utf-8", "replace")

    texts = [text_of(entry.token) for entry in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [max(entry.logprob, MIN_LOGPROB) for entry in tokens],
        "top_logprobs": [{text_of(token): max(value, MIN_LOGPROB) for token, value in entry.top} for entry in tokens],
        "text_offset": offsets,
    }

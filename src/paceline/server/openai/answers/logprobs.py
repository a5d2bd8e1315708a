"""Log-probabilities in OpenAI's two shapes."""

from collections.abc import Iterable, Sequence
from typing import Any

from paceline.core.output import TokenLogprobs
from paceline.models.tokenizer.tokenizer import Tokenizer

LOWEST = -9999.0
"""JSON has no minus infinity."""


def chat_logprobs(tokens: Iterable[TokenLogprobs], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The items of `logprobs.content`."""

    def item(token: int, logprob: float) -> dict[str, Any]:
        spelling = tokenizer.token_bytes(token)
        return {
            "token": spelling.decode("utf-8", "replace"),
            "logprob": max(logprob, LOWEST),
            "bytes": list(spelling),
        }

    return [
        {**item(entry.token, entry.logprob), "top_logprobs": [item(*other) for other in entry.top]} for entry in tokens
    ]


def completion_logprobs(tokens: Sequence[TokenLogprobs], tokenizer: Tokenizer, offset: int) -> dict[str, Any]:
    """Parallel lists; `offset` is where in the completion's text the first token begins."""

    def spelled(token: int) -> str:
        return tokenizer.token_bytes(token).decode("utf-8", "replace")

    texts = [spelled(entry.token) for entry in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [max(entry.logprob, LOWEST) for entry in tokens],
        "top_logprobs": [{spelled(token): max(value, LOWEST) for token, value in entry.top} for entry in tokens],
        "text_offset": offsets,
    }

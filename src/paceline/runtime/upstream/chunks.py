"""Server-sent events of a completion as step outputs."""

import json
from collections.abc import Mapping
from typing import Any

from paceline.core.errors import GenerationFailed, PacelineError
from paceline.core.output import StepOutput, TokenLogprobs
from paceline.core.sequence import FinishReason, Origin

TOKEN_ID = "token_id:"
FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class UpstreamFailed(PacelineError):
    """The server of another engine failed on a request; another worker may serve it."""


def parse_event(line: str) -> Mapping[str, Any] | None:
    """The JSON of an event. None for lines that are no event and for the end of the stream."""
    if not line.startswith("data:"):
        return None
    data = line[5:].strip()
    if data == "[DONE]":
        return None
    try:
        chunk = json.loads(data)
    except json.JSONDecodeError:
        raise UpstreamFailed(f"the server sent an event that is not JSON: {data[:200]}") from None
    if not isinstance(chunk, dict) or "error" in chunk:
        raise UpstreamFailed(f"the server failed: {str(chunk)[:300]}")
    return chunk


def step_output(chunk: Mapping[str, Any], request_id: str, choice: int, wants_logprobs: bool) -> StepOutput | None:
    """What the chunk adds to a choice. None if it adds nothing. Raises `UpstreamFailed` if it has no token ids."""
    choices = chunk.get("choices") or ()
    if not choices:
        return None
    value = choices[0]
    reason = value.get("finish_reason")
    if reason is not None and reason not in FINISH_REASONS:
        raise UpstreamFailed(f"the server ended the text with {reason!r}")  # vLLM's `abort`: another worker may go on
    ids = value.get("token_ids")
    if ids is None and value.get("text"):
        raise GenerationFailed("the server sends no token ids: it needs `return_token_ids`")
    tokens = tuple(ids or ())
    if not tokens and reason is None:
        return None
    details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
    return StepOutput(
        request_id,
        choice,
        choice,
        tokens,
        (Origin.PLAIN,) * len(tokens),
        num_cached=details.get("cached_tokens") or 0,
        logprobs=_logprobs(value.get("logprobs"), tokens) if wants_logprobs else None,
        finish_reason=None if reason is None else FINISH_REASONS[reason],
    )


def _logprobs(value: Mapping[str, Any] | None, tokens: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
    if not tokens:
        return ()
    if value is None or len(value["token_logprobs"]) != len(tokens):
        raise GenerationFailed("the server sent no log-probabilities")
    rows = value.get("top_logprobs") or [None] * len(tokens)
    return tuple(
        _token_logprobs(token, logprob, row or {})
        for token, logprob, row in zip(tokens, value["token_logprobs"], rows, strict=True)
    )


def _token_logprobs(token: int, logprob: float, row: Mapping[str, float]) -> TokenLogprobs:
    try:
        top = tuple((int(text.removeprefix(TOKEN_ID)), value) for text, value in row.items())
    except ValueError:
        raise GenerationFailed("the server names alternatives by text: it needs `return_tokens_as_token_ids`") from None
    return TokenLogprobs(token, logprob, top, 1 + sum(value > logprob for _, value in top))

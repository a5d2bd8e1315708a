"""Log-probabilities of prompt tokens, in the format of vLLM's `prompt_logprobs`."""

from collections.abc import Sequence
from typing import Any

from paceline.core.output import TokenLogprobs
from paceline.models.tokenizer.tokenizer import Tokenizer
from paceline.server.openai.answers.answer import MIN_LOGPROB


def prompt_logprobs(
    scores: Sequence[TokenLogprobs], tokenizer: Tokenizer, top_n: int | None = None
) -> list[dict[int, Any] | None]:
    """One entry per prompt token: its own log-probability and those of the likeliest tokens, by token id. The first is None.
    `top_n` limits the likeliest tokens."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        text = tokenizer.token_bytes(token).decode("utf-8", "replace")
        return {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": text}

    entries: list[dict[int, Any] | None] = [None]
    for score in scores:
        values = {score.token: entry(score.token, score.logprob, score.rank)}
        for rank, (token, logprob) in enumerate(score.top[:top_n], 1):
            values.setdefault(token, entry(token, logprob, rank))
        entries.append(values)
    return entries

"""A vLLM server as an endpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.sampling import SamplingParams
from paceline.endpoints.endpoint import Endpoint, EndpointRound, Outcome
from paceline.endpoints.http_client import EndpointFailed
from paceline.endpoints.picks import accept, pick, refuse_processed

TOKEN_ID = "token_id:"
"""Prefix of a token id in place of a token's text."""


class VllmEndpoint(Endpoint):
    """Verifies through the log-probabilities of prompt tokens: vLLM computes the whole prompt in every round."""

    kind = "vLLM"

    async def draft(self, ids: Sequence[int], depth: int, sampling: SamplingParams, timeout: float) -> tuple[int, ...]:
        body = {
            "prompt": list(ids),
            "max_tokens": depth,
            "temperature": 0,
            "return_token_ids": True,
            "ignore_eos": sampling.ignore_eos,
        }
        return _token_ids(self, await self.complete(body, timeout))

    def refusal(self, sampling: SamplingParams) -> str | None:
        return refuse_processed(sampling, self.kind)

    async def verify(self, round_: EndpointRound) -> Outcome:
        sampling, start = round_.sampling, len(round_.ids)
        top = 1 if sampling.is_greedy else sampling.top_k
        body = {
            "prompt": [*round_.ids, *round_.draft],
            "max_tokens": 1,
            "temperature": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "logprobs": None if sampling.is_greedy else top,
            "prompt_logprobs": top if round_.draft else None,
        }
        choice = await self.complete(body)
        picks: list[int] = []
        for i, drafted in enumerate(round_.draft):
            picks.append(pick(_prompt_row(self, choice, start + i), sampling, start + i))
            if picks[-1] != drafted:
                return accept(round_, picks)
        if sampling.is_greedy:
            picks.append(_token_ids(self, choice)[0])
        else:
            row = _output_row(self, choice)
            picks.append(pick(row, sampling, start + len(round_.draft)))
        return accept(round_, picks)


def _token_ids(endpoint: Endpoint, choice: Mapping[str, Any]) -> tuple[int, ...]:
    ids = choice.get("token_ids")
    if not ids:
        raise EndpointFailed(f"{endpoint} returned no token ids: it needs `return_token_ids` (vLLM 0.10.2 or later)")
    return tuple(ids)


def _prompt_row(endpoint: Endpoint, choice: Mapping[str, Any], position: int) -> dict[int, float]:
    """{token: log-probability} of the likeliest tokens at a position of the prompt."""
    try:
        entries = choice["prompt_logprobs"][position]
        return {int(token): entry["logprob"] for token, entry in entries.items()}
    except (KeyError, IndexError, TypeError, AttributeError):
        raise EndpointFailed(f"{endpoint} returned no log-probabilities of the prompt") from None


def _output_row(endpoint: Endpoint, choice: Mapping[str, Any]) -> dict[int, float]:
    """{token: log-probability} of the likeliest tokens after the prompt."""
    try:
        entries = choice["logprobs"]["top_logprobs"][0]
        return {int(text.removeprefix(TOKEN_ID)): logprob for text, logprob in entries.items()}
    except (KeyError, IndexError, TypeError, ValueError):
        raise EndpointFailed(f"{endpoint} returned no log-probabilities by token id") from None

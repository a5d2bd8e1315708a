"""A Paceline server as an endpoint."""

from collections.abc import Sequence
from typing import Any

from paceline.core.sampling import SamplingParams
from paceline.core.sequence import FinishReason
from paceline.endpoints.endpoint import Endpoint, EndpointRound, Outcome

SHARED_PARAMS = ("temperature", "top_k", "top_p", "min_p", "seed")
"""Parameters by which a draft follows the target's noise."""
VERIFIED_PARAMS = (
    *SHARED_PARAMS,
    "max_tokens",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
)


class PacelineEndpoint(Endpoint):
    """Verifies through /v1/verify, with every sampling parameter."""

    kind = "Paceline"

    async def draft(self, ids: Sequence[int], depth: int, sampling: SamplingParams, timeout: float) -> tuple[int, ...]:
        body: dict[str, Any] = {name: getattr(sampling, name) for name in SHARED_PARAMS}
        body |= {"prompt": list(ids), "max_tokens": depth, "return_token_ids": True, "ignore_eos": sampling.ignore_eos}
        return tuple((await self.complete(body, timeout))["token_ids"])

    def refusal(self, sampling: SamplingParams) -> str | None:
        return None

    async def verify(self, round_: EndpointRound) -> Outcome:
        sampling = round_.sampling
        body: dict[str, Any] = {name: getattr(sampling, name) for name in VERIFIED_PARAMS}
        body |= {
            "model": self.model,
            "prompt": list(round_.prompt),
            "output": list(round_.output),
            "draft": list(round_.draft),
            "stop_token_ids": list(sampling.stop_token_ids),
            "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()},
        }
        if sampling.json_schema is not None:
            schema = {"name": "output", "schema": dict(sampling.json_schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        answer = await self._client.post("/v1/verify", body)
        reason = answer["finish_reason"]
        return Outcome(tuple(answer["tokens"]), answer["accepted"], FinishReason(reason) if reason else None)

    @property
    def reports_ends(self) -> bool:
        return True

"""A request body's parameters as the engine's `SamplingParams` and `SpeculationParams`."""

from collections.abc import Mapping
from typing import Any

from paceline.core.sampling import SamplingParams
from paceline.core.speculation import SpeculationParams
from paceline.server.config.config import SamplingDefaults
from paceline.server.openai.schemas.generation import GenerationBody, JsonObject, JsonSchema

DEFAULTED = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Parameters for which the server has defaults of its own."""


def sampling_params(
    body: GenerationBody,
    defaults: SamplingDefaults,
    *,
    max_tokens: int,
    logprobs: int | None,
    seed: int,
    json_schema: Mapping[str, Any] | None,
    extra_stops: tuple[str, ...] = (),
) -> SamplingParams:
    """`json_schema` is what the output must satisfy, whoever asked for it."""
    chosen = {
        name: getattr(defaults, name) if getattr(body, name) is None else getattr(body, name) for name in DEFAULTED
    }
    chosen["top_k"] = max(0, chosen["top_k"])  # -1 is vLLM's word for off
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return SamplingParams(
        **chosen,
        max_tokens=max_tokens,
        logprobs=logprobs,
        seed=seed if body.seed is None else body.seed,
        n=body.n or 1,
        stop=stop + extra_stops,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        json_schema=json_schema,
    )


def response_schema(body: GenerationBody) -> Mapping[str, Any] | None:
    """The JSON schema that `response_format` asks for."""
    if isinstance(body.response_format, JsonObject):
        return {"type": "object"}
    if isinstance(body.response_format, JsonSchema):
        return body.response_format.json_schema.schema_
    return None


def speculation_params(body: GenerationBody, is_strict: bool) -> SpeculationParams:
    """In strict mode the target alone generates, whatever the body says."""
    if is_strict:
        return SpeculationParams(enabled=False)
    if body.speculation is None:
        return SpeculationParams()
    return SpeculationParams(**body.speculation.model_dump(exclude={"strict"}))

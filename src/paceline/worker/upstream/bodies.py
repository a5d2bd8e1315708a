"""Requests as bodies of /v1/completions of another engine, and what such an engine cannot do."""

from typing import Any

from paceline.core.errors import GenerationFailed, InvalidRequest
from paceline.core.request import Request, SamplingParams

SAME = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos")
"""Parameters that go into the body as they are."""


def check(request: Request, can_disable_speculation: bool) -> None:
    """Raises `InvalidRequest` with the parameter that the engine cannot serve, or `GenerationFailed` for a stream that
    cannot continue exactly. `can_disable_speculation` says that the server does not speculate, or lets each request turn it
    off."""
    sampling = request.sampling
    if sampling.prompt_logprobs is not None:
        raise InvalidRequest(
            "the engine of this pool streams no log-probabilities of prompts: remove prompt_logprobs", "prompt_logprobs"
        )
    if request.draft is not None:
        raise InvalidRequest("the engine of this pool verifies no drafts of clients", field="draft")
    if not request.speculation.enabled and not can_disable_speculation:
        raise InvalidRequest(
            "the engine of this pool cannot turn its speculation off for one request: remove speculation.enabled",
            field="speculation.enabled",
        )
    if any(request.committed) and (sampling.constraint is not None or _counts_output(sampling)):
        raise GenerationFailed(
            "a worker was lost, and the engine of this pool cannot continue a text with a JSON schema, a grammar, "
            "presence_penalty or frequency_penalty from its tokens: send the request again"
        )


def completion_body(request: Request, choice: int, model: str) -> dict[str, Any]:
    """The body of one choice, which continues after the committed tokens. Prompt and output are token ids."""
    sampling = request.sampling
    committed = list((request.committed[choice] or ()) if request.committed else ())
    body: dict[str, Any] = {name: getattr(sampling, name) for name in SAME}
    body |= {
        "model": model,
        "prompt": [*request.prompt_ids, *committed],
        "max_tokens": sampling.max_tokens - len(committed),
        "min_tokens": max(0, sampling.min_tokens - len(committed)),
        "top_k": sampling.top_k or -1,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
    }
    if sampling.seed is not None:
        body["seed"] = (sampling.seed + choice) % 2**63
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.logprobs is not None:
        body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
    if sampling.json_schema is not None:
        schema = {"name": "output", "schema": dict(sampling.json_schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if sampling.grammar is not None:
        body["structured_outputs"] = {"grammar": sampling.grammar}
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    return body


def _counts_output(sampling: SamplingParams) -> bool:
    """Whether `p` depends on which tokens are output: a continued text has them in its prompt."""
    return sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0

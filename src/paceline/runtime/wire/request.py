"""Requests and step outputs as messages, and back."""

import json
from collections.abc import Sequence
from dataclasses import fields

from paceline.cluster.routing.peer_hints import PeerHint
from paceline.core.errors import InvalidRequest
from paceline.core.output import StepOutput, TokenLogprobs
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import FinishReason, Origin
from paceline.core.speculation import SpeculationParams
from paceline.runtime.wire.codec import Malformed
from paceline.runtime.wire.messages import MAX_MESSAGE_BYTES
from paceline.runtime.wire.stream_messages import (
    TO_TARGET_WORKER,
    Output,
    Submit,
    WireLogprobs,
    WireSampling,
    WireSpeculation,
)

ORIGINS = tuple(Origin)
_SAMPLING = tuple(field.name for field in fields(SamplingParams))
_SPECULATION = tuple(field.name for field in fields(SpeculationParams))


def to_submit(request: Request, attempt: int, epoch: int, peer: PeerHint | None = None) -> Submit:
    """`request` has a seed: two workers that draw their own would say different things."""
    sampling = {name: getattr(request.sampling, name) for name in _SAMPLING}
    assert sampling["seed"] is not None
    schema = sampling["json_schema"]
    sampling["json_schema"] = None if schema is None else json.dumps(schema)
    return Submit(
        epoch=epoch,
        attempt=attempt,
        prompt_ids=list(request.prompt_ids),
        sampling=WireSampling(**sampling),
        speculation=WireSpeculation(**{name: getattr(request.speculation, name) for name in _SPECULATION}),
        category=request.category,
        priority=request.priority,
        salt=request.cache_salt,
        committed=[None if tokens is None else list(tokens) for tokens in request.committed],
        trace=request.trace,
        peer="" if peer is None else peer.worker,
        peer_tokens=0 if peer is None else peer.tokens,
    )


def check_fits(request: Request) -> None:
    """Raise `InvalidRequest` for what the wire would not carry: a worker drops what it cannot read, and nobody would hear."""
    try:
        data = TO_TARGET_WORKER.encode(to_submit(request, 0, 0))
        if len(data) > MAX_MESSAGE_BYTES // 2:  # what is generated has to fit too, should it be continued elsewhere
            raise Malformed(f"it is {len(data)} bytes long")
        TO_TARGET_WORKER.decode(data)
    except (Malformed, UnicodeEncodeError) as error:
        raise InvalidRequest(f"the request is beyond what a cluster takes: {error}") from None


def from_submit(message: Submit, request_id: str) -> Request:
    """Raises `InvalidRequest` for what no request may hold."""
    sampling = {name: getattr(message.sampling, name) for name in _SAMPLING}
    schema = sampling["json_schema"]
    try:
        sampling["json_schema"] = None if schema is None else json.loads(schema)
    except ValueError as error:
        raise InvalidRequest(f"the JSON schema is no JSON: {error}", field="response_format") from None
    return Request(
        id=request_id,
        prompt_ids=tuple(message.prompt_ids),
        sampling=SamplingParams(**sampling),
        speculation=SpeculationParams(**{name: getattr(message.speculation, name) for name in _SPECULATION}),
        category=message.category,
        priority=message.priority,
        cache_salt=message.salt,
        committed=tuple(None if tokens is None else tuple(tokens) for tokens in message.committed),
        trace=message.trace,
    )


def to_output(output: StepOutput, attempt: int, start: int) -> Output:
    logprobs = output.logprobs
    return Output(
        attempt=attempt,
        choice=output.choice,
        start=start,
        tokens=list(output.tokens),
        origins=[ORIGINS.index(origin) for origin in output.origins],
        text=output.text,
        drafted=output.drafted,
        accepted=output.accepted,
        num_cached=output.num_cached,
        logprobs=None if logprobs is None else [WireLogprobs(p.token, p.logprob, list(p.top)) for p in logprobs],
        finish_reason=None if output.finish_reason is None else output.finish_reason.value,
        method=output.method,
        waited=output.waited,
    )


def from_output(output: Output, request_id: str) -> StepOutput:
    """Raises `ValueError` for words that are none of ours."""
    if any(origin >= len(ORIGINS) for origin in output.origins) or len(output.origins) != len(output.tokens):
        raise ValueError("origins do not fit the tokens")
    return StepOutput(
        request_id=request_id,
        sequence_id=output.choice,
        choice=output.choice,
        tokens=tuple(output.tokens),
        origins=tuple(ORIGINS[origin] for origin in output.origins),
        text=output.text,
        drafted=output.drafted,
        accepted=output.accepted,
        num_cached=output.num_cached,
        logprobs=None if output.logprobs is None else _logprobs(output.logprobs),
        finish_reason=None if output.finish_reason is None else FinishReason(output.finish_reason),
        method=output.method,
        waited=output.waited,
    )


def _logprobs(records: Sequence[WireLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(p.token, p.logprob, tuple((t, v) for t, v in p.top)) for p in records)

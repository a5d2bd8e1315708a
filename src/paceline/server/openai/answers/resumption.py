"""Responses of resumable streams: a first one, and one that continues after the last event that its client has seen."""

import asyncio
import hashlib
from dataclasses import replace

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from paceline.core.output import StepOutput
from paceline.core.request import ValidatedRequest
from paceline.core.sequence import FinishReason, Origin
from paceline.runtime.wire.target_messages import TokensReply
from paceline.server.auth.api_keys import ApiKey
from paceline.server.gateway.session import RequestSession
from paceline.server.openai.answers.answer import DONE, Answer
from paceline.server.openai.answers.position import HEADER, LastEvent
from paceline.server.openai.answers.response import EVENT_STREAM, GenerationResponse
from paceline.server.openai.errors import BadRequest, NotFound
from paceline.server.openai.schemas.body import GenerationBody


async def respond(session: RequestSession, answer: Answer, body: GenerationBody, http: HttpRequest) -> Response:
    """The response of a validated request. With `Last-Event-ID` it continues a stream, through any gateway of the cluster."""
    last = http.headers.get(HEADER)
    if not (body.stream and answer.is_resumable):
        return GenerationResponse(session, answer, body.stream)
    if len(session.requests) > 1 or session.is_strict:
        raise BadRequest(
            "a resumable stream has one prompt and is not strict",
            param="stream_options.resumable",
            code="invalid_value",
        )
    if last is None:
        session.replace_request(_with_key(session.requests[0], answer.id, session.key))
        return GenerationResponse(session, answer, is_stream=True)
    event = LastEvent.parse(last)
    request = _with_key(session.requests[0], event.answer_id, session.key)
    reply = await asyncio.wrap_future(session.gateway.target.request_tokens(request.resume_key))
    if reply is None or not _covers(reply, event, request.sampling.n):
        raise NotFound(
            "no worker has this stream: it ended over a minute ago, its worker is gone, or the body or the key differs. Send "
            "the request without Last-Event-ID",
            code="stream_not_found",
        )
    seen = [
        _seen(request, choice, reply.choices[choice][: position.num_tokens], position.is_finished)
        for choice, position in enumerate(event.choices)
    ]
    committed = tuple(
        None if position.is_finished else tuple(reply.choices[choice][: position.num_tokens])
        for choice, position in enumerate(event.choices)
    )
    assert reply.seed is not None
    sampling = replace(request.sampling, seed=reply.seed)
    session.replace_request(replace(request, committed=committed, sampling=sampling))
    for output in seen:
        session.add_text(output)
    answer.resume(event.answer_id, seen)
    if all(position.is_finished for position in event.choices):
        headers = {name.decode(): value.decode() for name, value in EVENT_STREAM["headers"]}  # type: ignore[attr-defined]
        return Response(answer.chunks([]) + DONE, headers=headers)
    return GenerationResponse(session, answer, is_stream=True)


def _with_key(request: ValidatedRequest, answer_id: str, key: ApiKey) -> ValidatedRequest:
    """The request with its resume key, which only the same API key and the same body yield again."""
    sampling = msgspec.json.encode(replace(request.sampling, seed=0), order="sorted")
    parts = (answer_id, key.id, key.digest, request.cache_salt, request.prompt_ids, sampling)
    return replace(request, resume_key=hashlib.sha256(repr(parts).encode()).hexdigest())


def _covers(reply: TokensReply, event: LastEvent, num_choices: int) -> bool:
    """Whether the worker has the tokens that the client has seen."""
    if len(event.choices) != num_choices or len(reply.choices) != num_choices:
        return False
    return all(
        len(tokens) >= position.num_tokens for tokens, position in zip(reply.choices, event.choices, strict=True)
    )


def _seen(request: ValidatedRequest, choice: int, tokens: list[int], is_finished: bool) -> StepOutput:
    """The part of a choice that the client has, as one output."""
    return StepOutput(
        request.id,
        choice,
        choice,
        tuple(tokens),
        (Origin.PLAIN,) * len(tokens),
        finish_reason=FinishReason.STOP if is_finished else None,
    )

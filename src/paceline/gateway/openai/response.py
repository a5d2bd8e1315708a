"""The HTTP response of a generation: one JSON body or server-sent events.

A resumable stream has a first response, and further ones that continue after the last event that the client has seen.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from paceline.core.output import StepOutput
from paceline.core.request import ValidatedRequest
from paceline.core.sequence import FinishReason, Origin
from paceline.gateway.api.bodies import GenerationBody
from paceline.gateway.api.errors import ApiError, BadRequest, ClientDisconnected, NotFound, to_api_error
from paceline.gateway.openai.resumption import HEADER, NOT_FOUND, LastEvent, is_reproducible, resumable
from paceline.gateway.sessions import RequestSession
from paceline.wire.gateway_messages import TokensReply

logger = logging.getLogger(__name__)

LAST_EVENT_SECONDS = 1.0
"""Time after the deadline in which the client may still read its error."""
KEEP_ALIVE_SECONDS = 15.0
"""Silence after which a stream of events gets a comment, which clients skip: they and proxies give up on silent connections."""
KEEP_ALIVE = b": keep-alive\n\n"
_EVENTS = b"text/event-stream"
STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class SentAnswer(Protocol):
    """Makes one response, or the events of a stream, of step outputs."""

    @property
    def id(self) -> str: ...

    @property
    def content_type(self) -> bytes:
        """That of a stream."""
        ...

    @property
    def is_resumable(self) -> bool: ...

    @property
    def end(self) -> bytes:
        """What follows the last event of a stream."""
        ...

    def add(self, output: StepOutput) -> Any:
        """Adds a step output, for `response`."""
        ...

    def chunks(self, outputs: Sequence[StepOutput]) -> bytes:
        """The events of these outputs."""
        ...

    def response(self) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The event of an error after the start of a stream."""
        ...

    def begin(self, request: ValidatedRequest) -> None:
        """The answer is a resumable stream of this request, which has its resume key."""
        ...

    def resume(self, request: ValidatedRequest, event: LastEvent, outputs: Sequence[StepOutput]) -> None:
        """Becomes the answer of `event`, the last one that the client has. `outputs` are those up to there, if a worker has
        kept them."""
        ...

    def split(self, outputs: Sequence[StepOutput]) -> list[StepOutput]:
        """The outputs, divided where the part ends that the client of a resumed stream has."""
        ...

    @property
    def is_before_event(self) -> bool:
        """Whether the stream is generated again, and has not reached the last event that the client has."""
        ...


class GenerationResponse(Response):
    """Runs a session and sends its answer. Admission happens here, so that the session closes when the response ends."""

    def __init__(self, session: RequestSession, answer: SentAnswer, is_stream: bool) -> None:
        self._session, self._answer, self._is_stream = session, answer, is_stream
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._session.run(self._answer.id), self._watch_client(receive):
            if self._is_stream:
                await self._stream_until_deadline(scope, send)
                return
            async for outputs in self._session.outputs():
                for output in outputs:
                    self._answer.add(output)
        await JSONResponse(self._answer.response())(scope, receive, send)

    async def _stream_until_deadline(self, scope: Scope, send: Send) -> None:
        """Aborts the connection if the deadline passes while the client reads nothing: `send` would wait for it."""
        try:
            async with asyncio.timeout_at(self._session.deadline + LAST_EVENT_SECONDS):
                await self._stream(send)
        except TimeoutError as error:
            self._session.record_error(error)
            abort = scope["state"].get("abort_connection")
            if abort is not None:
                abort()
                await asyncio.sleep(0)  # the server learns of it in the next turn of the loop

    async def _stream(self, send: Send) -> None:
        """Sends the HTTP status with the first token that the client lacks, or with the first comment, so that an earlier
        failure can set its own."""
        stream = _SentStream(send, self._answer.content_type)
        try:
            async with stream.kept_alive():
                async for outputs in self._session.outputs():
                    body = self._answer.chunks(outputs)
                    if body or not self._answer.is_before_event:
                        await stream.add(body)
            await self._session.finish_audit()
        except ClientDisconnected as error:
            self._session.record_error(error)
            return
        except Exception as error:
            if not stream.is_started:
                raise
            self._session.record_error(error)
            api_error = to_api_error(error)
            if api_error.status >= 500:
                extra = {"request_id": self._answer.id}
                logger.error("a stream ended with an error: %s", error, exc_info=api_error is not error, extra=extra)
            await stream.add(self._answer.failure(api_error))
        await stream.end(self._answer.end)

    @asynccontextmanager
    async def _watch_client(self, receive: Receive) -> AsyncIterator[None]:
        """Fails the session if the client disconnects inside the block."""

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._session.fail(ClientDisconnected())

        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


class _SentStream:
    """Sends the messages of a streamed response, which two tasks add, one after the other."""

    def __init__(self, send: Send, content_type: bytes) -> None:
        self._send, self._content_type = send, content_type
        self.is_started, self._is_silent, self._lock = False, True, asyncio.Lock()

    async def add(self, body: bytes) -> None:
        """Sends `body`, after the HTTP status if that was not sent yet."""
        self._is_silent = False
        async with self._lock:
            if not self.is_started:
                self.is_started = True
                headers = [(b"content-type", self._content_type), *STREAM_HEADERS]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            if body:
                await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes) -> None:
        async with self._lock:
            await self._send({"type": "http.response.body", "body": body, "more_body": False})

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Sends comments into a stream of events while the block sends nothing."""
        if not self._content_type.startswith(_EVENTS):
            yield
            return
        task = asyncio.create_task(self._send_comments())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _send_comments(self) -> None:
        while True:
            self._is_silent = True
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            if self._is_silent:
                await self.add(KEEP_ALIVE)


async def respond(session: RequestSession, answer: SentAnswer, body: GenerationBody, http: HttpRequest) -> Response:
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
        request = resumable(session.requests[0], answer.id, session.key, body.seed is None)
        session.replace_request(request)
        answer.begin(request)
        return GenerationResponse(session, answer, is_stream=True)
    event = LastEvent.parse(last)
    # The request keeps its own id: the one that it continues may still run under the id of the answer
    request = resumable(session.requests[0], event.answer_id, session.key, body.seed is None)
    event.check_request(request)
    reply = await asyncio.wrap_future(session.gateway.target.request_tokens(request.resume_key))
    if reply is not None and _covers(reply, event):
        seen = _seen(request, event, reply)
        request = _continued(request, event, reply)
    else:
        _check_reproducible(session, request, event)
        seen = []
    session.replace_request(request)
    for output in seen:
        session.add_text(output)
    answer.resume(request, event, seen)
    session.split_outputs(answer.split)
    if seen and all(position.is_finished for position in event.choices):
        response = Response(answer.chunks([]) + answer.end, media_type=answer.content_type.decode())
        response.raw_headers += STREAM_HEADERS
        return response
    return GenerationResponse(session, answer, is_stream=True)


def _check_reproducible(session: RequestSession, request: ValidatedRequest, event: LastEvent) -> None:
    """Raises `NotFound` if no worker knows a stream whose text the seed alone does not decide."""
    default = session.gateway.config.engine.speculation.verification
    if event.fingerprint and is_reproducible(request.sampling, request.speculation, default):
        return
    raise NotFound(
        "no worker has this stream: it ended over a minute ago, or its worker is gone. It cannot be generated again: its text "
        "depends on more than its seed. Send the request without Last-Event-ID",
        code=NOT_FOUND,
    )


def _continued(request: ValidatedRequest, event: LastEvent, reply: TokensReply) -> ValidatedRequest:
    """The request with the tokens that the client has."""
    committed = tuple(
        None if position.is_finished else tuple(reply.choices[choice][: position.num_tokens])
        for choice, position in enumerate(event.choices)
    )
    return replace(request, committed=committed, sampling=replace(request.sampling, seed=reply.seed))


def _covers(reply: TokensReply, event: LastEvent) -> bool:
    """Whether the worker has the tokens that the client has seen."""
    return len(reply.choices) == len(event.choices) and all(
        len(tokens) >= position.num_tokens for tokens, position in zip(reply.choices, event.choices, strict=True)
    )


def _seen(request: ValidatedRequest, event: LastEvent, reply: TokensReply) -> list[StepOutput]:
    """The part of each choice that the client has, as one output."""
    return [
        StepOutput(
            request.id,
            choice,
            choice,
            tuple(reply.choices[choice][: position.num_tokens]),
            (Origin.PLAIN,) * position.num_tokens,
            finish_reason=FinishReason.STOP if position.is_finished else None,
        )
        for choice, position in enumerate(event.choices)
    ]

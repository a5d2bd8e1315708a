"""Refuses request bodies that nobody should have to parse: too large, told or not, or with halves of characters in them."""

import json
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.auth.middleware import refuse
from paceline.server.openai.errors import ApiError, BadRequest, BodyTooLarge

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class BodyCheck:
    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            told = dict(scope["headers"]).get(b"content-length", b"0")
            if told.isdigit() and int(told) > self._limit:
                raise BodyTooLarge(self._limit)
            body = await self._read(receive)
            _check_characters(body)
        except ApiError as error:
            await refuse(error, scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, receive: Receive) -> bytes:
        chunks, size = [], 0
        while True:
            message = await receive()
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self._limit:
                raise BodyTooLarge(self._limit)
            if not message.get("more_body"):  # the end, or a client that went away: the app will hear of that itself
                return b"".join(chunks)


def _check_characters(body: bytes) -> None:
    """JSON can spell half of a surrogate pair. It is no character, and no tokenizer takes it."""
    if not SURROGATE.search(body):
        return
    try:
        text = json.dumps(json.loads(body), ensure_ascii=False)
    except (ValueError, RecursionError):  # no JSON at all: whoever parses it will say so
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRequest(
            "the body has half of a surrogate pair (\\ud800 to \\udfff) in it", code="invalid_json"
        ) from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """`receive` with the body, in one piece, in front."""
    first: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def replayed() -> Message:
        nonlocal first
        message, first = first, None
        return message or await receive()

    return replayed

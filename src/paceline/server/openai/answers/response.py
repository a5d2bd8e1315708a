"""The HTTP response of a generation: one JSON body or server-sent events."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from paceline.server.gateway.session import RequestSession
from paceline.server.openai.answers.answer import DONE, Answer
from paceline.server.openai.errors import ClientDisconnected, to_api_error

logger = logging.getLogger(__name__)

LAST_EVENT_SECONDS = 1.0
"""Time after the deadline in which the client may still read its error."""
EVENT_STREAM = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


class GenerationResponse(Response):
    """Runs a session and sends its answer. Admission happens here, so that the session closes when the response ends."""

    def __init__(self, session: RequestSession, answer: Answer, is_stream: bool) -> None:
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
        """Sends the HTTP status with the first token, so that an earlier failure can set its own status."""
        is_started = False
        try:
            async for outputs in self._session.outputs():
                if not is_started:
                    await send(EVENT_STREAM)
                    is_started = True
                body = self._answer.chunks(outputs)
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            await self._session.finish_audit()
        except ClientDisconnected as error:
            self._session.record_error(error)
            return
        except Exception as error:
            if not is_started:
                raise
            self._session.record_error(error)
            api_error = to_api_error(error)
            if api_error.status >= 500:
                extra = {"request_id": self._answer.id}
                logger.error("a stream ended with an error: %s", error, exc_info=api_error is not error, extra=extra)
            event = f"data: {json.dumps(api_error.body())}\n\n".encode()
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

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

"""Carries a request from admission to the end of its response, whole or as server-sent events, and notices clients that
leave."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from paceline.core.request import Request
from paceline.server.gateway.gateway import Gateway
from paceline.server.gateway.output_stream import Ticket
from paceline.server.gateway.session import Visit
from paceline.server.openai.answers.answer import DONE, Answer
from paceline.server.openai.errors import ClientGone, as_api_error

logger = logging.getLogger(__name__)

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
    """Admission happens when the response is sent, so that the block that holds the seat is the one that writes."""

    def __init__(
        self,
        gateway: Gateway,
        visit: Visit,
        requests: Sequence[Request],
        answer: Answer,
        stream: bool,
        timeout: float | None,
    ) -> None:
        self._gateway, self._visit, self._requests, self._answer = gateway, visit, requests, answer
        self._is_stream, self._timeout = stream, timeout
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._visit.logged(self._answer.id, self._requests), self._visit.paid(self._requests):
            async with (
                self._gateway.submit(self._requests, self._timeout) as ticket,
                self._visit.recorded(self._answer.id, self._requests),
                _watched(receive, ticket),
            ):
                if self._is_stream:
                    await self._stream(ticket, send)
                    return
                async for outputs in ticket:
                    self._visit.saw(outputs)
                    for output in outputs:
                        self._answer.add(output)
        await JSONResponse(self._answer.whole())(scope, receive, send)

    async def _stream(self, ticket: Ticket, send: Send) -> None:
        """The status goes out with the first token: until then a failure still has one of its own."""
        started = False
        try:
            async for outputs in ticket:
                if not started:
                    await send(EVENT_STREAM)
                    started = True
                self._visit.saw(outputs)
                body = self._answer.chunks(outputs)
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            await self._visit.finish()
        except ClientGone as gone:
            self._visit.failed(gone)
            return
        except Exception as error:
            if not started:
                raise
            self._visit.failed(error)
            problem = as_api_error(error)
            if problem.status >= 500:
                about = {"request_id": self._answer.id}
                logger.error("a stream broke off: %s", error, exc_info=problem is not error, extra=about)
            event = f"data: {json.dumps(problem.body())}\n\n".encode()
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


@asynccontextmanager
async def _watched(receive: Receive, ticket: Ticket) -> AsyncIterator[None]:
    """Inside the block, a client that goes away fails the ticket."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        ticket.fail(ClientGone())

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher

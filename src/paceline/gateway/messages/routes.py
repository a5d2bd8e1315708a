"""The routes of the Messages API: /v1/messages and /v1/messages/count_tokens."""

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from paceline.gateway.api.messages_bodies import MessagesBody
from paceline.gateway.bodies import translated
from paceline.gateway.messages.answer import MessagesAnswer
from paceline.gateway.openai import ModelServices, new_id

EVENTS: dict[str, Any] = {
    "application/json": {"schema": {"type": "object"}},
    "text/event-stream": {"example": 'event: message_start\ndata: {"type": "message_start", ...}\n\n'},
}


class ClaudeErrorObject(BaseModel):
    type: str
    message: str


class ClaudeErrorBody(BaseModel):
    """Anthropic's error body."""

    type: str
    error: ClaudeErrorObject


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ClaudeErrorBody, "description": description}
    for status, description in (
        (400, "Invalid request, or a prompt that is too long"),
        (401, "No valid API key"),
        (403, "The key lacks a scope, or the page has a foreign origin"),
        (404, "Unknown model"),
        (408, "The request passed its time limit"),
        (413, "The body is too large"),
        (415, "The body is compressed"),
        (429, "The key reached a limit: see Retry-After"),
        (500, "Internal error"),
        (503, "The server is shutting down"),
        (529, "The queue is full: see Retry-After"),
    )
}


def messages_routes(services: ModelServices) -> APIRouter:
    router = APIRouter(tags=["messages"], responses=ERRORS)

    @router.post("/v1/messages", responses={200: {"content": EVENTS}})
    async def answer(body: MessagesBody, http: Request) -> Response:
        return await services.of(body.model).chat(new_id("msg_"), translated(body), http, MessagesAnswer)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: MessagesBody, http: Request) -> dict[str, int]:
        return {"input_tokens": await services.of(body.model).count_tokens(translated(body), http)}

    return router

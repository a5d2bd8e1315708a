"""The routes of the Responses API: /v1/responses, its stored responses, and /v1/responses/input_tokens."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic import TypeAdapter
from starlette.responses import Response

from paceline.gateway.api.errors import BadRequest, NotFound
from paceline.gateway.api.responses_bodies import InputItem, ItemReference, ResponsesBody
from paceline.gateway.auth import request_key
from paceline.gateway.bodies import translated
from paceline.gateway.openai import Event, ModelServices, new_id
from paceline.gateway.responses.answer import ResponsesAnswer
from paceline.gateway.responses.store import ResponseStore, StoredResponse

EVENTS: dict[str, Any] = {
    "application/json": {"schema": {"type": "object"}},
    "text/event-stream": {"example": 'event: response.created\ndata: {"type": "response.created", ...}\n\n'},
}
_items: TypeAdapter[InputItem] = TypeAdapter(InputItem)


class _Conversations:
    """The conversations that a server keeps, as requests continue them."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def items(self, body: ResponsesBody, key: str) -> tuple[InputItem, ...]:
        """The items of the previous response and of the body, without references."""
        earlier: tuple[InputItem, ...] = ()
        if body.previous_response_id is not None:
            stored = self._store.get(key, body.previous_response_id)
            if stored is None:
                raise BadRequest(
                    f"previous response with id {body.previous_response_id!r} not found: it was not stored, was too old, or "
                    "another gateway has it. Send the whole conversation in `input`",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            earlier = stored.items
        found = (self._resolve(item, key) for item in body.items)
        return (*earlier, *(item for item in found if item is not None))

    def _resolve(self, item: InputItem, key: str) -> InputItem | None:
        if not isinstance(item, ItemReference):
            return item
        found = self._store.item(key, item.id)
        if found is None and not item.id.startswith("rs_"):  # a conversation is complete without its reasoning
            raise NotFound(
                f"item with id {item.id!r} not found: send the item itself, or `store: true` with its request",
                param="input",
                code="item_not_found",
            )
        return found

    def keeper(
        self, items: tuple[InputItem, ...], key: str, is_kept: bool
    ) -> Callable[[Mapping[str, Any], Sequence[Event]], None]:
        """What keeps the finished response to these items."""

        def keep(response: Mapping[str, Any], output: Sequence[Event]) -> None:
            if is_kept:
                answered = {item["id"]: _items.validate_python(item) for item in output}
                self._store.add(key, StoredResponse(response, (*items, *answered.values()), answered))

        return keep


def responses_routes(services: ModelServices) -> APIRouter:
    router = APIRouter(tags=["responses"])
    store = ResponseStore(time.monotonic)
    conversations = _Conversations(store)

    @router.post("/v1/responses", responses={200: {"content": EVENTS}})
    async def respond(body: ResponsesBody, http: Request) -> Response:
        service, key = services.of(body.model), request_key(http).id
        items = conversations.items(body, key)
        keep = conversations.keeper(items, key, body.store)
        new_answer = partial(ResponsesAnswer, body=body, keep=keep)
        return await service.chat(new_id("resp_"), translated(body.with_items(items)), http, new_answer)

    @router.post("/v1/responses/input_tokens")
    async def count_input_tokens(body: ResponsesBody, http: Request) -> dict[str, Any]:
        items = conversations.items(body, request_key(http).id)
        count = await services.of(body.model).count_tokens(translated(body.with_items(items)), http)
        return {"object": "response.input_tokens", "input_tokens": count}

    @router.get("/v1/responses/{response_id}")
    async def read_response(response_id: str, http: Request) -> dict[str, Any]:
        stored = store.get(request_key(http).id, response_id)
        if stored is None:
            raise _not_found(response_id)
        return dict(stored.response)

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str, http: Request) -> dict[str, Any]:
        if not store.delete(request_key(http).id, response_id):
            raise _not_found(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return router


def _not_found(response_id: str) -> NotFound:
    return NotFound(f"response with id {response_id!r} not found", param="response_id", code="not_found")

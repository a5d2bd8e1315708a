"""The routes of Ollama's API: /api/chat, /api/generate, /api/tags, /api/show, /api/ps and /api/version."""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from paceline.gateway.api.errors import BadRequest
from paceline.gateway.api.ollama_bodies import OllamaBody, OllamaChatBody, OllamaGenerateBody, OllamaShowBody
from paceline.gateway.bodies import translated
from paceline.gateway.ollama.answer import OllamaAnswer, utc_now
from paceline.gateway.openai import ModelService, ModelServices, new_id

VERSION = "0.13.4"
"""The version of Ollama whose API these routes follow: clients check for it."""
TAG = ":latest"
ARCHITECTURE = "paceline"
FOREVER = "9999-12-31T23:59:59Z"
"""A model that is served is not unloaded."""
LINES: dict[str, Any] = {
    "application/json": {"schema": {"type": "object"}},
    "application/x-ndjson": {"example": '{"model": "smollm2", "message": {...}, "done": false}\n'},
}


class OllamaErrorBody(BaseModel):
    """Ollama's error body."""

    error: str


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": OllamaErrorBody, "description": description}
    for status, description in (
        (400, "Invalid request, or a prompt that is too long"),
        (401, "No valid API key"),
        (403, "The key lacks a scope, or the page has a foreign origin"),
        (404, "Unknown model"),
        (408, "The request passed its time limit"),
        (413, "The body is too large"),
        (415, "The body is compressed"),
        (429, "The queue is full, or the key reached a limit: see Retry-After"),
        (500, "Internal error"),
        (503, "The server is shutting down"),
    )
}


class _JsonRoute(APIRoute):
    """Reads every body as JSON, as Ollama does: `curl -d` and some clients send JSON under another content type."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            others = [(name, value) for name, value in request.scope["headers"] if name != b"content-type"]
            scope = {**request.scope, "headers": [*others, (b"content-type", b"application/json")]}
            return await handle(Request(scope, request.receive))

        return handle_json


def ollama_routes(services: ModelServices) -> APIRouter:
    router = APIRouter(tags=["ollama"], responses=ERRORS, route_class=_JsonRoute)
    started = utc_now()

    def service_of(name: str | None) -> ModelService:
        """The model with this name. Clients add the tag `latest` to names without a tag."""
        names = {service.gateway.model for service in services}
        return services.of(name.removesuffix(TAG) if name is not None and name not in names else name)

    def listed(service: ModelService) -> dict[str, Any]:
        """The model in a list. Fields of Ollama that this server does not know are absent."""
        card = service.card
        return {
            "name": card.id,
            "model": card.id,
            "modified_at": started,
            "digest": card.system_fingerprint or "",
            "details": {"quantization_level": service.target.config.quantization},
        }

    async def generate(body: OllamaBody, http: Request, is_chat: bool, text: str | None = None) -> Response:
        service = service_of(body.model)
        if body.is_empty:
            return JSONResponse(_loaded(body.model, is_chat))
        new_answer = partial(OllamaAnswer, is_chat=is_chat, name=body.model)
        return await service.chat(new_id("ollama_"), translated(body), http, new_answer, text)

    @router.post("/api/chat", responses={200: {"content": LINES}})
    async def chat(body: OllamaChatBody, http: Request) -> Response:
        return await generate(body, http, True)

    @router.post("/api/generate", responses={200: {"content": LINES}})
    async def generate_text(body: OllamaGenerateBody, http: Request) -> Response:
        service = service_of(body.model)
        if body.is_text or service.tokenizer.chat_template is None:
            text: str | None = service.encoder.fill_in(body.prompt, body.suffix or "")
        else:
            text = None
        return await generate(body, http, False, text)

    @router.get("/api/tags")
    async def list_models() -> dict[str, Any]:
        return {"models": [listed(service) for service in services]}

    @router.get("/api/ps")
    async def list_running() -> dict[str, Any]:
        return {
            "models": [
                {**listed(service), "expires_at": FOREVER, "context_length": service.target.max_model_len}
                for service in services
            ]
        }

    @router.post("/api/show")
    async def show(body: OllamaShowBody) -> dict[str, Any]:
        name = body.model or body.name
        if name is None:
            raise BadRequest("model is required", param="model", code="missing_required_parameter")
        service = service_of(name)
        capabilities = ["completion", "tools", *(["thinking"] if service.has_reasoning else [])]
        return {
            **listed(service),
            "template": service.tokenizer.chat_template or "",
            "capabilities": capabilities,
            "model_info": {
                "general.architecture": ARCHITECTURE,
                f"{ARCHITECTURE}.context_length": service.target.max_model_len,
            },
        }

    @router.get("/api/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    return router


def _loaded(model: str, is_chat: bool) -> dict[str, Any]:
    """The answer to a request without a prompt, which asks for the model to be loaded."""
    empty: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return {"model": model, "created_at": utc_now(), **empty, "done": True, "done_reason": "load"}

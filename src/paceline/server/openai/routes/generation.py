"""/v1/chat/completions and /v1/completions."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.core.errors import InvalidRequest, PromptTooLong
from paceline.core.request import Request as EngineRequest
from paceline.engine.validator import draw_seed
from paceline.server.gateway.service import Service
from paceline.server.openai.answers.chat import ChatAnswer
from paceline.server.openai.answers.completion import CompletionAnswer
from paceline.server.openai.answers.respond import GenerationResponse
from paceline.server.openai.params import response_schema, sampling_params
from paceline.server.openai.schemas.chat import ChatBody
from paceline.server.openai.schemas.completions import DEFAULT_MAX_TOKENS, CompletionBody
from paceline.server.openai.schemas.messages import last_words
from paceline.server.openai.schemas.responses import ChatCompletion, Completion
from paceline.server.openai.tools.tool_use import ToolUse

EVENTS: dict[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}


def generation_routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["generation"])
    gateway, defaults = service.gateway, service.gateway.config.sampling
    about = (service.model, service.fingerprint, service.llm.config.speculation.max_depth)

    @router.post("/v1/chat/completions", responses={200: {"model": ChatCompletion, "content": EVENTS}})
    async def chat(body: ChatBody, http: Request) -> Response:
        service.check_model(body.model)
        visit = service.visit(http, body)
        visit.check(1, body.n or 1)
        gateway.check_room(body.n or 1)
        tool_use = ToolUse.of(body)
        prompt = await service.prompts.of_messages(body.messages, tool_use.tools if tool_use else ())
        if len(prompt) >= service.llm.max_model_len:
            raise PromptTooLong(len(prompt), service.llm.max_model_len, field="messages")
        sampling = sampling_params(
            body,
            defaults,
            max_tokens=body.token_limit or defaults.max_tokens or service.llm.max_model_len,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            seed=draw_seed(),
            json_schema=tool_use.json_schema if tool_use else response_schema(body),
            extra_stops=tool_use.stops if tool_use else (),
        )
        requests = service.requests(http, body, visit, [prompt], sampling, last_words(body.messages))
        if tool_use is not None and tool_use.json_schema is not None:
            await _check_tools(service, requests[0])
        answer = ChatAnswer(requests, *about, service.tokenizer, body.stream_options, tool_use=tool_use)
        return GenerationResponse(gateway, visit, requests, answer, body.stream, body.timeout)

    @router.post("/v1/completions", responses={200: {"model": Completion, "content": EVENTS}})
    async def completions(body: CompletionBody, http: Request) -> Response:
        service.check_model(body.model)
        visit = service.visit(http, body)
        visit.check(len(body.prompts), len(body.prompts) * (body.n or 1))
        gateway.check_room(len(body.prompts) * (body.n or 1))
        prompts = [
            await service.prompts.of_text(prompt) if isinstance(prompt, str) else tuple(prompt)
            for prompt in body.prompts
        ]
        sampling = sampling_params(
            body,
            defaults,
            max_tokens=body.max_tokens or defaults.max_tokens or DEFAULT_MAX_TOKENS,
            logprobs=body.logprobs,
            seed=draw_seed(),
            json_schema=response_schema(body),
        )
        requests = service.requests(http, body, visit, prompts, sampling)
        answer = CompletionAnswer(requests, *about, service.tokenizer, body.stream_options)
        return GenerationResponse(gateway, visit, requests, answer, body.stream, body.timeout)

    return router


async def _check_tools(service: Service, request: EngineRequest) -> None:
    """A schema that cannot be used came with the tools, not with a response format."""
    try:
        await asyncio.to_thread(service.llm.validate, request)
    except InvalidRequest as error:
        raise InvalidRequest(str(error), "tools" if error.field == "response_format" else error.field) from None

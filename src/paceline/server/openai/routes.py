"""The OpenAI-compatible routes: completions, models, /tokenize and /detokenize."""

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.core.errors import InvalidRequest, PromptTooLong
from paceline.core.request import draw_seed
from paceline.server.gateway.gateway import Gateway
from paceline.server.gateway.session import RequestSession
from paceline.server.openai.answers.answer import AnswerContext
from paceline.server.openai.answers.chat import ChatAnswer
from paceline.server.openai.answers.completion import CompletionAnswer
from paceline.server.openai.answers.response import GenerationResponse
from paceline.server.openai.requests import (
    PromptEncoder,
    build_requests,
    response_schema,
    sampling_params,
    truncate_prompt,
)
from paceline.server.openai.schemas.chat import ChatBody, last_user_text
from paceline.server.openai.schemas.completions import (
    DEFAULT_MAX_TOKENS,
    CompletionBody,
    DetokenizeBody,
    DetokenizeResponse,
    TokenizeBody,
    TokenizeResponse,
)
from paceline.server.openai.schemas.responses import ChatCompletion, Completion, Model, ModelList
from paceline.server.openai.tools import ToolUse

EVENTS: dict[str, Any] = {"text/event-stream": {"example": "data: {...}\n\ndata: [DONE]\n\n"}}


def generation_routes(gateway: Gateway) -> APIRouter:
    """/v1/chat/completions and /v1/completions."""
    router = APIRouter(tags=["generation"])
    defaults, max_output, target = gateway.sampling, gateway.config.sampling.max_tokens, gateway.target
    encoder = PromptEncoder(gateway.tokenizer, target.max_model_len)
    context = AnswerContext(gateway.model, gateway.fingerprint, target.max_depth, gateway.tokenizer)

    @router.post("/v1/chat/completions", responses={200: {"model": ChatCompletion, "content": EVENTS}})
    async def chat(body: ChatBody, http: Request) -> Response:
        gateway.check_model(body.model)
        session = RequestSession.open(gateway, http, body)
        session.check_limits(1, body.n or 1)
        tool_use = ToolUse.from_body(body)
        tools = tool_use.tools if tool_use else ()
        prompt = await encoder.encode_messages(
            body.messages, tools, body.add_generation_prompt, body.chat_template_kwargs
        )
        prompt = truncate_prompt(prompt, body, target.max_model_len)
        if len(prompt) >= target.max_model_len:
            raise PromptTooLong(len(prompt), target.max_model_len, field="messages")
        sampling = sampling_params(
            body,
            defaults,
            max_tokens=body.token_limit or max_output or target.max_model_len,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            seed=draw_seed(),
            json_schema=tool_use.json_schema if tool_use else response_schema(body),
            extra_stops=tool_use.stops if tool_use else (),
        )
        bare = build_requests(http, body, session, [prompt], sampling, last_user_text(body.messages))
        requests = await session.validate(bare, body.timeout, "tools" if tool_use else "response_format")
        answer = ChatAnswer(requests, context, body, tool_use)
        return GenerationResponse(session, answer, body.stream)

    @router.post("/v1/completions", responses={200: {"model": Completion, "content": EVENTS}})
    async def completions(body: CompletionBody, http: Request) -> Response:
        gateway.check_model(body.model)
        session = RequestSession.open(gateway, http, body)
        session.check_limits(len(body.prompts), len(body.prompts) * (body.n or 1))
        prompts = [
            await encoder.encode_text(prompt, body.add_special_tokens) if isinstance(prompt, str) else tuple(prompt)
            for prompt in body.prompts
        ]
        prompts = [truncate_prompt(prompt, body, target.max_model_len) for prompt in prompts]
        max_tokens = body.max_tokens or max_output or DEFAULT_MAX_TOKENS
        sampling = sampling_params(
            body,
            defaults,
            max_tokens=1 if body.max_tokens == 0 else max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=body.engine_prompt_logprobs,
            seed=draw_seed(),
            json_schema=response_schema(body),
        )
        requests = await session.validate(build_requests(http, body, session, prompts, sampling), body.timeout)
        answer = CompletionAnswer(requests, context, body)
        return GenerationResponse(session, answer, body.stream)

    return router


def model_routes(gateway: Gateway) -> APIRouter:
    """/v1/models, /tokenize and /detokenize."""
    router = APIRouter(tags=["model"])
    tokenizer, max_model_len = gateway.tokenizer, gateway.target.max_model_len
    encoder = PromptEncoder(tokenizer, max_model_len)
    model = Model(
        id=gateway.model,
        object="model",
        created=int(time.time()),
        owned_by="paceline",
        root=gateway.target.config.model,
        max_model_len=max_model_len,
    )

    @router.get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(object="list", data=[model])

    @router.get("/v1/models/{name:path}")
    async def read_model(name: str) -> Model:
        gateway.check_model(name)
        return model

    @router.post("/tokenize", response_model_exclude_none=True)
    async def tokenize(body: TokenizeBody, http: Request) -> TokenizeResponse:
        gateway.check_model(body.model)
        RequestSession.open(gateway, http).charge_call()
        if body.messages is not None:
            ids = await encoder.encode_messages(body.messages, body.tools or ())
        else:
            ids = await encoder.encode_text(body.prompt or "", body.add_special_tokens)
        texts = [tokenizer.token(token) or "" for token in ids] if body.return_token_strs else None
        return TokenizeResponse(count=len(ids), max_model_len=max_model_len, tokens=list(ids), token_strs=texts)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody, http: Request) -> DetokenizeResponse:
        gateway.check_model(body.model)
        RequestSession.open(gateway, http).charge_call()
        unknown = next((token for token in body.tokens if tokenizer.token(token) is None), None)
        if unknown is not None:
            raise InvalidRequest(f"the vocabulary has no token {unknown}", field="tokens")
        return DetokenizeResponse(prompt=tokenizer.decode(body.tokens, skip_special=False))

    return router

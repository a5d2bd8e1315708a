"""The OpenAI-compatible routes: completions, verify, models, /tokenize and /detokenize."""

import time
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.core.errors import InvalidRequest
from paceline.core.request import SpeculationParams, draw_seed
from paceline.gateway.api.chat_bodies import ChatBody
from paceline.gateway.api.completion_bodies import (
    DEFAULT_MAX_TOKENS,
    CompletionBody,
    DetokenizeBody,
    DetokenizeResponse,
    TokenizeBody,
    TokenizeResponse,
    VerifyBody,
    VerifyResponse,
)
from paceline.gateway.api.messages import last_user_text
from paceline.gateway.api.responses import ChatCompletion, Completion, Model, ModelList
from paceline.gateway.bodies import owner_of
from paceline.gateway.formats import AnswerFormat
from paceline.gateway.openai.answer import AnswerContext
from paceline.gateway.openai.chat import ChatAnswer
from paceline.gateway.openai.completion import CompletionAnswer, VerifyAnswer
from paceline.gateway.openai.requests import (
    PromptEncoder,
    build_requests,
    output_constraint,
    sampling_params,
    truncate_prompt,
)
from paceline.gateway.openai.response import GenerationResponse, respond
from paceline.gateway.openai.tools import ToolUse, answer_parser, stops
from paceline.gateway.sessions import Gateway, RequestSession, ServedModels

PROMPT_END = 32
"""Tokens at the end of a prompt, which show whether the answer begins with reasoning."""
EVENTS: dict[str, Any] = {"text/event-stream": {"example": "data: {...}\n\ndata: [DONE]\n\n"}}


class _Model:
    """What the routes need of one model."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway, self.target, self.tokenizer = gateway, gateway.target, gateway.tokenizer
        self.defaults, self.max_output = gateway.sampling, gateway.config.sampling.max_tokens
        self.encoder = PromptEncoder(gateway.tokenizer, gateway.max_chars, gateway.encoders)
        self.context = AnswerContext(gateway.model, gateway.target.max_depth, gateway.tokenizer)
        settings = gateway.config
        self.format = AnswerFormat.of(gateway.tokenizer.chat_template, settings.tool_parser, settings.reasoning_parser)
        self.special_texts = {gateway.tokenizer.token(token) for token in gateway.tokenizer.special_ids}
        self.card = Model(
            id=gateway.model,
            object="model",
            created=int(time.time()),
            owned_by="paceline",
            root=gateway.target.config.model,
            max_model_len=gateway.target.max_model_len,
        )

    def current_card(self) -> Model:
        """The card with the fingerprint that its workers have now."""
        return self.card.model_copy(update={"system_fingerprint": self.target.fingerprint or None})


def generation_routes(models: ServedModels) -> APIRouter:
    """/v1/chat/completions, /v1/completions and /v1/verify. `model` in the body chooses the model."""
    router = APIRouter(tags=["generation"])
    served = {gateway: _Model(gateway) for gateway in models}

    @router.post("/v1/chat/completions", responses={200: {"model": ChatCompletion, "content": EVENTS}})
    async def chat(body: ChatBody, http: Request) -> Response:
        return await _chat(served[models.of(body.model)], body, http)

    @router.post("/v1/completions", responses={200: {"model": Completion, "content": EVENTS}})
    async def completions(body: CompletionBody, http: Request) -> Response:
        return await _complete(served[models.of(body.model)], body, http)

    @router.post("/v1/verify", responses={200: {"model": VerifyResponse}})
    async def verify(body: VerifyBody, http: Request) -> Response:
        return await _verify(served[models.of(body.model)], body, http)

    return router


async def _chat(model: _Model, body: ChatBody, http: Request) -> Response:
    """Encodes the messages with the chat template and generates the next model."""
    session, target = RequestSession.open(model.gateway, http, body), model.target
    session.check_limits(1, body.n or 1)
    answer_form = output_constraint(body)
    tool_use, format_ = ToolUse.from_body(body, answer_form), model.format
    tools = tool_use.tools if tool_use else ()
    prompt = await model.encoder.encode_messages(
        owner_of(http.scope), body.messages, tools, body.add_generation_prompt, body.template_variables
    )
    prompt = truncate_prompt(prompt, body, target.max_model_len)
    constraint = tool_use.json_schema if tool_use else answer_form
    needs_special = constraint is None and not model.special_texts.isdisjoint(format_.markers(tool_use is not None))
    sampling = sampling_params(
        body,
        model.defaults,
        max_tokens=body.token_limit or model.max_output or target.max_model_len,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        seed=draw_seed(),
        constraint=constraint,
        extra_stops=stops(format_, tool_use),
        skip_special_tokens=body.skip_special_tokens and not needs_special,
    )
    schema_field = "tools" if body.is_call_forced else "response_format"
    answer_id, topic = ChatAnswer.new_id(), last_user_text(body.messages)
    bare = build_requests(http, body, session, answer_id, [prompt], sampling, topic)
    requests = await session.validate(bare, body.timeout, schema_field, "messages")
    prompt_end = model.tokenizer.decode(prompt[-PROMPT_END:], skip_special=False)
    new_parser = partial(answer_parser, format_, tool_use, prompt_end, constraint is not None)
    custom = tool_use.custom_names if tool_use else frozenset[str]()
    answer = ChatAnswer(answer_id, requests, model.context, body, new_parser, custom)
    return await respond(session, answer, body, http)


async def _complete(model: _Model, body: CompletionBody, http: Request) -> Response:
    """Generates the text after each prompt."""
    session, target = RequestSession.open(model.gateway, http, body), model.target
    session.check_limits(len(body.prompts), len(body.prompts) * (body.n or 1))
    owner, prompts = owner_of(http.scope), []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            text = model.encoder.fill_in(prompt, body.suffix or "")
            ids = await model.encoder.encode_text(owner, text, body.add_special_tokens)
        else:
            ids = tuple(prompt)
        prompts.append(truncate_prompt(ids, body, target.max_model_len))
    max_tokens = body.max_tokens or model.max_output or DEFAULT_MAX_TOKENS
    sampling = sampling_params(
        body,
        model.defaults,
        max_tokens=1 if body.max_tokens == 0 else max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.engine_prompt_logprobs,
        seed=draw_seed(),
        constraint=output_constraint(body),
    )
    answer_id = CompletionAnswer.new_id()
    bare = build_requests(http, body, session, answer_id, prompts, sampling)
    requests = await session.validate(bare, body.timeout)
    answer = CompletionAnswer(answer_id, requests, model.context, body)
    return await respond(session, answer, body, http)


async def _verify(model: _Model, body: VerifyBody, http: Request) -> Response:
    """Verifies the draft of another server in one step."""
    session, target = RequestSession.open(model.gateway, http, body), model.target
    if session.is_strict:
        raise InvalidRequest("strict mode generates without drafts: use /v1/completions", field="draft")
    session.check_limits(1, 1)
    sampling = sampling_params(
        body,
        model.defaults,
        max_tokens=body.max_tokens or model.max_output or DEFAULT_MAX_TOKENS,
        logprobs=None,
        prompt_logprobs=None,
        seed=0,  # a greedy text has no noise
        constraint=output_constraint(body),
    )
    bare = build_requests(http, body, session, VerifyAnswer.new_id(), [tuple(body.prompt)], sampling)
    round_ = replace(
        bare[0],
        committed=(tuple(body.output),) if body.output else (),
        draft=tuple(body.draft),
        speculation=SpeculationParams(enabled=False),
    )
    requests = await session.validate([round_], body.timeout)
    return GenerationResponse(session, VerifyAnswer(requests[0], model.context, body, target.max_model_len), False)


def model_routes(models: ServedModels) -> APIRouter:
    """/v1/models, /tokenize and /detokenize."""
    router = APIRouter(tags=["model"])
    served = {gateway: _Model(gateway) for gateway in models}

    @router.get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(object="list", data=[model.current_card() for model in served.values()])

    @router.get("/v1/models/{name:path}")
    async def read_model(name: str) -> Model:
        return served[models.of(name)].current_card()

    @router.post("/tokenize", response_model_exclude_none=True)
    async def tokenize(body: TokenizeBody, http: Request) -> TokenizeResponse:
        model = served[models.of(body.model)]
        RequestSession.open(model.gateway, http).charge_call()
        if body.messages is not None:
            ids = await model.encoder.encode_messages(owner_of(http.scope), body.messages, body.tools or ())
        else:
            ids = await model.encoder.encode_text(owner_of(http.scope), body.prompt or "", body.add_special_tokens)
        texts = [model.tokenizer.token(token) or "" for token in ids] if body.return_token_strs else None
        return TokenizeResponse(
            count=len(ids), max_model_len=model.target.max_model_len, tokens=list(ids), token_strs=texts
        )

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody, http: Request) -> DetokenizeResponse:
        model = served[models.of(body.model)]
        RequestSession.open(model.gateway, http).charge_call()
        unknown = next((token for token in body.tokens if model.tokenizer.token(token) is None), None)
        if unknown is not None:
            raise InvalidRequest(f"the vocabulary has no token {unknown}", field="tokens")
        return DetokenizeResponse(prompt=model.tokenizer.decode(body.tokens, skip_special=False))

    return router

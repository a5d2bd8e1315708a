"""The OpenAI-compatible routes: completions, verify, models, /tokenize and /detokenize."""

from dataclasses import replace

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
from paceline.gateway.api.responses import ChatCompletion, Completion, Model, ModelList
from paceline.gateway.bodies import owner_of
from paceline.gateway.openai.chat import ChatAnswer
from paceline.gateway.openai.completion import CompletionAnswer, VerifyAnswer
from paceline.gateway.openai.requests import (
    build_requests,
    output_constraint,
    sampling_params,
    truncate_prompt,
)
from paceline.gateway.openai.response import GenerationResponse, respond
from paceline.gateway.openai.service import EVENTS, ModelService, ModelServices, new_id
from paceline.gateway.sessions import RequestSession


def generation_routes(services: ModelServices) -> APIRouter:
    """/v1/chat/completions, /v1/completions and /v1/verify. `model` in the body chooses the model."""
    router = APIRouter(tags=["generation"])

    @router.post("/v1/chat/completions", responses={200: {"model": ChatCompletion, "content": EVENTS}})
    async def chat(body: ChatBody, http: Request) -> Response:
        return await services.of(body.model).chat(new_id(ChatAnswer.prefix), body, http, ChatAnswer)

    @router.post("/v1/completions", responses={200: {"model": Completion, "content": EVENTS}})
    async def completions(body: CompletionBody, http: Request) -> Response:
        return await _complete(services.of(body.model), body, http)

    @router.post("/v1/verify", responses={200: {"model": VerifyResponse}})
    async def verify(body: VerifyBody, http: Request) -> Response:
        return await _verify(services.of(body.model), body, http)

    return router


async def _complete(model: ModelService, body: CompletionBody, http: Request) -> Response:
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
    answer_id = new_id(CompletionAnswer.prefix)
    bare = build_requests(http, body, session, answer_id, prompts, sampling)
    requests = await session.validate(bare, body.timeout)
    answer = CompletionAnswer(answer_id, requests, model.context, body)
    return await respond(session, answer, body, http)


async def _verify(model: ModelService, body: VerifyBody, http: Request) -> Response:
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
    bare = build_requests(http, body, session, new_id(VerifyAnswer.prefix), [tuple(body.prompt)], sampling)
    round_ = replace(
        bare[0],
        committed=(tuple(body.output),) if body.output else (),
        draft=tuple(body.draft),
        speculation=SpeculationParams(enabled=False),
    )
    requests = await session.validate([round_], body.timeout)
    return GenerationResponse(session, VerifyAnswer(requests[0], model.context, body, target.max_model_len), False)


def model_routes(services: ModelServices) -> APIRouter:
    """/v1/models, /tokenize and /detokenize."""
    router = APIRouter(tags=["model"])

    @router.get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(object="list", data=[service.card for service in services])

    @router.get("/v1/models/{name:path}")
    async def read_model(name: str) -> Model:
        return services.of(name).card

    @router.post("/tokenize", response_model_exclude_none=True)
    async def tokenize(body: TokenizeBody, http: Request) -> TokenizeResponse:
        model = services.of(body.model)
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
        model = services.of(body.model)
        RequestSession.open(model.gateway, http).charge_call()
        unknown = next((token for token in body.tokens if model.tokenizer.token(token) is None), None)
        if unknown is not None:
            raise InvalidRequest(f"the vocabulary has no token {unknown}", field="tokens")
        return DetokenizeResponse(prompt=model.tokenizer.decode(body.tokens, skip_special=False))

    return router

"""/v1/models, /tokenize and /detokenize."""

import time

from fastapi import APIRouter, Request

from paceline.core.errors import InvalidRequest
from paceline.server.gateway.service import Service
from paceline.server.openai.schemas.responses import Model, ModelList
from paceline.server.openai.schemas.tokens import DetokenizeBody, Detokenized, TokenizeBody, Tokenized


def token_routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["model"])
    model = Model(
        id=service.model,
        object="model",
        created=int(time.time()),
        owned_by="paceline",
        max_model_len=service.llm.max_model_len,
    )

    @router.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(object="list", data=[model])

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Model:
        service.check_model(name)
        return model

    @router.post("/tokenize", response_model_exclude_none=True)
    async def tokenize(body: TokenizeBody, http: Request) -> Tokenized:
        service.check_model(body.model)
        service.visit(http).once()
        if body.messages is not None:
            ids = await service.prompts.of_messages(body.messages, body.tools or ())
        else:
            ids = await service.prompts.of_text(body.prompt or "", body.add_special_tokens)
        strings = [service.tokenizer.token(token) or "" for token in ids] if body.return_token_strs else None
        return Tokenized(count=len(ids), max_model_len=service.llm.max_model_len, tokens=list(ids), token_strs=strings)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody, http: Request) -> Detokenized:
        service.check_model(body.model)
        service.visit(http).once()
        unknown = next((token for token in body.tokens if service.tokenizer.token(token) is None), None)
        if unknown is not None:
            raise InvalidRequest(f"there is no token {unknown}", field="tokens")
        return Detokenized(prompt=service.tokenizer.decode(body.tokens, skip_special=False))

    return router

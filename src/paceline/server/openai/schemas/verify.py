"""Bodies of POST /v1/verify."""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from paceline.core.speculation import MAX_DEPTH
from paceline.server.openai.schemas.body import (
    UNSUPPORTED_PARAMS,
    GenerationBody,
    TokenId,
    UnsupportedParams,
    inconsistent,
)
from paceline.server.openai.schemas.completions import DEFAULT_MAX_TOKENS, MAX_IDS, TokenIds
from paceline.server.openai.schemas.responses import Usage


class VerifyBody(GenerationBody):
    """Body of POST /v1/verify: one round of speculative decoding with a draft that the client made."""

    unsupported: ClassVar[UnsupportedParams] = {
        **UNSUPPORTED_PARAMS,
        "n": ((1,), "verify each choice in a call of its own"),
        "stream": ((False,), "a round is one response"),
        "stop": (([],), "end the text at a stop string in the client, or use `stop_token_ids`"),
        "prompt_logprobs": ((), "request them from /v1/completions"),
        "truncate_prompt_tokens": ((), "truncate the prompt in the client"),
        "speculation": ((), "the client drafts"),
    }

    prompt: TokenIds
    """Token ids of the prompt."""
    output: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_IDS)] = Field(default_factory=list)
    """Output tokens that earlier rounds committed."""
    draft: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_DEPTH)] = Field(default_factory=list)
    """Drafted tokens, a chain; empty for a plain step."""

    @model_validator(mode="after")
    def _check(self) -> "VerifyBody":
        if self.temperature != 0 and self.seed is None:
            raise inconsistent("seed", "rounds of one text share a seed: set seed, or temperature to 0")
        if len(self.output) >= (self.max_tokens or DEFAULT_MAX_TOKENS):
            raise inconsistent("output", "output has max_tokens tokens already: raise max_tokens")
        return self


class VerifyResponse(BaseModel):
    id: str
    object: Literal["verify"]
    created: int
    model: str
    system_fingerprint: str
    tokens: list[int]
    """The accepted tokens, then the target's own next token. An end token is included."""
    accepted: int
    """Accepted draft tokens, including those after an end token."""
    finish_reason: Literal["stop", "length"] | None
    """Why the text ended. None if it continues with the next round."""
    usage: Usage

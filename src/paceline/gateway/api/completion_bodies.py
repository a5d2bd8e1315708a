"""Bodies of POST /v1/completions, /tokenize, /detokenize and /v1/verify."""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from paceline.core.request import MAX_DEPTH
from paceline.gateway.api.bodies import (
    IGNORED_PARAMS,
    MAX_TOKENS,
    UNSUPPORTED_PARAMS,
    Body,
    GenerationBody,
    TokenId,
    UnsupportedParams,
    inconsistent,
)
from paceline.gateway.api.messages import Messages, Tools
from paceline.gateway.api.responses import Usage

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for a request without `max_tokens`."""

MAX_IDS = 1 << 20
"""Token ids of one prompt; the model's context window is the tighter limit."""
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_IDS)]


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions."""

    unsupported: ClassVar[UnsupportedParams] = {
        **UNSUPPORTED_PARAMS,
        "best_of": ((1,), "request `n` choices with `logprobs` and select one"),
    }

    ignored = IGNORED_PARAMS - {"return_tokens_as_token_ids"}

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=128)]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=128)]
    )
    """A string, a list of token ids, or a list of strings or token-id lists."""
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    """Most output tokens. 0 needs `echo`, and the response then has the prompt alone."""
    suffix: str | None = None
    """Text after the one to generate, for models that were trained to fill in the middle. Empty means none."""
    echo: bool = False
    """Whether the text starts with the prompt, and `logprobs` with those of the prompt."""
    add_special_tokens: bool = True
    """Whether the tokens of a text prompt include the special tokens that the model expects."""
    logprobs: int | None = Field(None, ge=0, le=20)
    return_tokens_as_token_ids: bool = False
    """Whether `logprobs` names tokens as `token_id:123` in place of their text, which may be ambiguous."""

    @model_validator(mode="after")
    def _check(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            raise inconsistent("max_tokens", "max_tokens must be at least 1 without echo")
        if self.suffix and (self.echo or any(not isinstance(prompt, str) for prompt in self.prompts)):
            raise inconsistent("suffix", "a suffix needs prompts as text, without echo")
        return self

    @property
    def engine_prompt_logprobs(self) -> int | None:
        """Alternatives that the engine reports with each prompt token, for `prompt_logprobs` or `echo` with `logprobs`."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class TokenizeBody(Body):
    """Body of POST /tokenize, as in vLLM."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True
    """Adds special tokens to `prompt`; the chat template adds those of `messages`."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise inconsistent("prompt", "send either prompt or messages")
        return self


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(Body):
    """Body of POST /detokenize, as in vLLM."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_IDS)]


class DetokenizeResponse(BaseModel):
    prompt: str


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
    system_fingerprint: str | None
    tokens: list[int]
    """The accepted tokens, then the target's own next token. An end token is included."""
    accepted: int
    """Accepted draft tokens, including those after an end token."""
    finish_reason: Literal["stop", "length"] | None
    """Why the text ended. None if it continues with the next round."""
    usage: Usage

"""Bodies of POST /v1/completions, /tokenize and /detokenize."""

from typing import Annotated, ClassVar

from pydantic import BaseModel, Field, model_validator

from paceline.server.openai.schemas.body import (
    IGNORED_PARAMS,
    MAX_TOKENS,
    UNSUPPORTED_PARAMS,
    Body,
    GenerationBody,
    TokenId,
    UnsupportedParams,
    inconsistent,
)
from paceline.server.openai.schemas.chat import Messages, Tool

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for a request without `max_tokens`."""

MAX_IDS = 1 << 20
"""Token ids of one prompt; the model's context window is the tighter limit."""
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_IDS)]


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions."""

    unsupported: ClassVar[UnsupportedParams] = {
        **UNSUPPORTED_PARAMS,
        "suffix": (("",), "the model writes from left to right only"),
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
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=128)] | None = None
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

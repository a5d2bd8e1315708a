"""Response bodies for the OpenAPI document. The server writes responses as dictionaries for speed."""

from typing import Any, Literal

from pydantic import BaseModel

from paceline.core.output import SpeculationMetrics


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorObject


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ResponseMetrics(BaseModel):
    speculative_decoding: SpeculationMetrics
    num_rounds: int
    """Rounds of all choices, those without drafts included."""


class ResponseFunction(BaseModel):
    name: str
    arguments: str


class ResponseToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: ResponseFunction


class ResponseCustom(BaseModel):
    name: str
    input: str


class ResponseCustomCall(BaseModel):
    id: str
    type: Literal["custom"]
    custom: ResponseCustom


class ResponseMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning: str | None = None
    """Only present if the model wrote reasoning before the answer."""
    reasoning_content: str | None = None
    """The same as `reasoning`, under its older name."""
    tool_calls: list[ResponseToolCall | ResponseCustomCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ResponseMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | None = None
    """Only present with `return_token_ids`."""


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    """What its text depends on, apart from request and seed. None if it is not known, or if choices differ in it."""
    choices: list[ChatChoice]
    usage: Usage
    metrics: ResponseMetrics
    prompt_token_ids: list[int] | None = None
    """Only present with `return_token_ids`."""
    prompt_logprobs: list[dict[int, Any] | None] | None = None
    """Only present with `prompt_logprobs`."""


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    prompt_token_ids: list[int] | None = None
    """Only present with `return_token_ids`."""
    token_ids: list[int] | None = None
    """Only present with `return_token_ids`."""
    prompt_logprobs: list[dict[int, Any] | None] | None = None
    """Only present with `prompt_logprobs`."""


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    """What its text depends on, apart from request and seed. None if it is not known, or if choices differ in it."""
    choices: list[CompletionChoice]
    usage: Usage
    metrics: ResponseMetrics


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """Model as the server loaded it."""
    parent: None = None
    max_model_len: int
    has_chat_template: bool = True
    system_fingerprint: str | None = None
    """That of responses, if all workers of the model have the same."""


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class HealthStatus(BaseModel):
    status: str

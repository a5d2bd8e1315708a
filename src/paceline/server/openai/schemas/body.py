"""Request bodies: the common rules, and the parameters of both generation endpoints."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from paceline.core.speculation import MAX_DEPTH, Verification

UnsupportedParams = dict[str, tuple[tuple[Any, ...], str]]
"""OpenAI or vLLM parameters without support: values that are accepted and ignored, and the advice in the error."""

MAX_SEED = 2**63 - 1
MAX_TOKENS = 2**31 - 1
MAX_STOPS = 16
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class Body(BaseModel):
    """Rejects unknown keys, converts no types, and reads `null` as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    unsupported: ClassVar[UnsupportedParams] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_absent(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        present = {name: value for name, value in values.items() if value is not None}
        for name, (ignored, advice) in cls.unsupported.items():
            if name not in present:
                continue
            value = present.pop(name)
            if not any(value == same and type(value) is type(same) for same in ignored):
                raise PydanticCustomError(
                    "unsupported_parameter",
                    "{name} is not supported: {advice}",
                    {"name": name, "advice": advice},
                )
        return present


def inconsistent(param: str, message: str) -> PydanticCustomError:
    """The error of parameters that contradict each other; `param` is the one to change."""
    return PydanticCustomError("inconsistent", "{message}", {"message": message, "param": param})


UNSUPPORTED_PARAMS: UnsupportedParams = {
    "store": ((False,), "the server stores nothing"),
    "service_tier": (("auto", "default"), "there is one tier; use `priority`"),
    "min_tokens": ((0,), "use `ignore_eos` with `max_tokens`, or `logit_bias`"),
    "use_beam_search": ((False,), "sample `n` choices instead"),
    "prompt_logprobs": ((), "log-probabilities are returned for generated tokens only"),
    "guided_json": ((), "use `response_format` with type `json_schema`"),
    "structured_outputs": ((), "use `response_format` with type `json_schema`"),
}
"""Unsupported at both endpoints."""


class StreamOptions(Body):
    unsupported: ClassVar[UnsupportedParams] = {"include_obfuscation": ((False,), "the server does not pad chunks")}

    include_usage: bool = False
    """Adds a chunk with the usage of the whole request before `[DONE]`."""
    include_origins: bool = False
    """Adds `origins` to every choice of a chunk: the origin of each token's text."""


class SpeculationOptions(Body):
    """Speculation options of one request, within the limits of the server. They do not change the text."""

    enabled: bool = True
    method: str | None = None
    max_depth: int | None = Field(None, ge=0, le=MAX_DEPTH)
    verification: Verification | None = None
    strict: bool = False
    """No drafts; the server records the request in its audit log."""

    @model_validator(mode="after")
    def _check(self) -> "SpeculationOptions":
        chosen = {"enabled", "method", "max_depth", "verification"} & self.model_fields_set
        if self.strict and (chosen - {"enabled"} or ("enabled" in chosen and self.enabled)):
            raise inconsistent(
                "speculation.strict", "strict turns speculation off: remove the other speculation options"
            )
        return self


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchemaSpec(Body):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None
    """Ignored: the output always follows the schema."""


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchemaSpec


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class GenerationBody(Body):
    """Parameters that chat and text completions share."""

    model: str | None = None
    """Name of the served model; absent means that model."""
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    temperature: float | None = Field(None, ge=0, le=10)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=128)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = None
    """Values added to logits, by token id as a string."""
    response_format: ResponseFormat | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    # Identifiers for the client's own use; the server ignores them.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    """`category` is the traffic category, like the header X-Paceline-Category."""

    top_k: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    """Candidates per token; 0 or -1 means no limit."""
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    cache_salt: str | None = Field(None, max_length=256)
    """Salt of the prefix cache; requests with different salts share no cached prefix."""
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    """Scheduling priority; lower values run first."""
    timeout: float | None = Field(None, gt=0, le=86400)
    """Time limit in seconds; the server's `request_timeout` also applies."""
    speculation: SpeculationOptions | None = None

"""Parameters of /v1/chat/completions and /v1/completions alike: OpenAI's, and those that vLLM's users know."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from paceline.core.speculation import MAX_DEPTH, Verification
from paceline.server.openai.schemas.body import Body, Refusals

MAX_SEED = 2**63 - 1
MAX_TOKENS = 2**31 - 1
MAX_STOPS = 16
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]

REFUSED_EVERYWHERE: Refusals = {
    "store": ((False,), "nothing is stored"),
    "service_tier": (("auto", "default"), "there is one tier; use `priority`"),
    "min_tokens": ((0,), "use `ignore_eos` with `max_tokens`, or `logit_bias`"),
    "use_beam_search": ((False,), "sample `n` choices instead"),
    "prompt_logprobs": ((), "log-probabilities are given for generated tokens only"),
    "guided_json": ((), "use `response_format` with type `json_schema`"),
    "structured_outputs": ((), "use `response_format` with type `json_schema`"),
}


class StreamOptions(Body):
    refused: ClassVar[Refusals] = {"include_obfuscation": ((False,), "chunks are sent as they are")}

    include_usage: bool = False
    """One more chunk before `[DONE]`, with the usage of the whole request."""
    include_origins: bool = False
    """Every choice of a chunk says in `origins` where its text came from, token by token."""


class SpeculationOptions(Body):
    """What this request chooses within what the server offers. The text is the same whatever it is."""

    enabled: bool = True
    method: str | None = None
    max_depth: int | None = Field(None, ge=0, le=MAX_DEPTH)
    verification: Verification | None = None
    strict: bool = False
    """No drafts at all, and a record of what was generated in the server's trail."""

    @model_validator(mode="after")
    def _consistent(self) -> "SpeculationOptions":
        chosen = {"enabled", "method", "max_depth", "verification"} & self.model_fields_set
        if self.strict and (chosen - {"enabled"} or ("enabled" in chosen and self.enabled)):
            raise PydanticCustomError(
                "inconsistent",
                "strict leaves nothing to speculate with: leave out the rest of speculation",
                {"param": "speculation.strict"},
            )
        return self


class Text(Body):
    type: Literal["text"]


class JsonObject(Body):
    type: Literal["json_object"]


class JsonSchemaSpec(Body):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None
    """The output follows the schema either way."""


class JsonSchema(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchemaSpec


ResponseFormat = Annotated[Text | JsonObject | JsonSchema, Field(discriminator="type")]


class GenerationBody(Body):
    model: str | None = None
    """Absent: the model this server serves."""
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
    """Token ids, as strings, and what to add to their logits."""
    response_format: ResponseFormat | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    # Identify the caller to themselves; they change nothing in the answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    """`category` names the kind of traffic, as the header X-Paceline-Category does."""

    top_k: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    """0 or -1: off."""
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    cache_salt: str | None = Field(None, max_length=256)
    """Requests with different salts never share cached prefixes."""
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    """Lower is served first."""
    timeout: float | None = Field(None, gt=0, le=86400)
    """Seconds this request may take; the server's own limit holds as well."""
    speculation: SpeculationOptions | None = None

"""The rules of all request bodies, and the parameters that the two generation endpoints share.

`Body` has the rules. `GenerationBody` has the shared parameters.
"""

import logging
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from paceline.core.request import MAX_DEPTH, Verification

logger = logging.getLogger(__name__)

UnsupportedParams = dict[str, tuple[tuple[Any, ...], str]]
"""OpenAI or vLLM parameters that could change the text and have no support: values that mean the same as no parameter, and
the advice in the error."""
_warned: set[str] = set()
"""Ignored parameters that the log has named."""

MAX_WARNED = 1000
MAX_SEED = 2**63 - 1
MAX_TOKENS = 2**31 - 1
MAX_STOPS = 16
MAX_FIELDS = 256
MAX_BIASES = 4096
MAX_GRAMMAR = 1_000_000
MAX_CHOICES = 1024
MAX_METADATA = 64
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


def at_most(most: int) -> BeforeValidator:
    """Rejects a larger object before its values are validated: each could be an error of its own."""

    def check(values: Any) -> Any:
        if isinstance(values, dict) and len(values) > most:
            raise PydanticCustomError("too_many_fields", "an object has more than {most} fields", {"most": most})
        return values

    return BeforeValidator(check)


LogitBias = dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class Body(BaseModel):
    """Rejects unknown keys, converts no types, and reads `null` as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    unsupported: ClassVar[UnsupportedParams] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()
    """OpenAI or vLLM parameters without support that cannot change the text. The log names each of them once."""

    @model_validator(mode="before")
    @classmethod
    def _drop_absent(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if len(values) > MAX_FIELDS:  # each unknown one would be an error of its own
            raise PydanticCustomError("too_many_fields", "an object has more than {most} fields", {"most": MAX_FIELDS})
        present = {name: value for name, value in values.items() if value is not None and name not in cls.ignored}
        if len(present) < len(values):
            warn_of([name for name in cls.ignored if values.get(name) is not None], "it does not change the text")
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


def warn_of(names: Sequence[str], reason: str) -> None:
    """Logs that a request parameter is ignored, once for each name."""
    for name in names:
        if name not in _warned and len(_warned) < MAX_WARNED:
            _warned.add(name)
            logger.warning("the request parameter %.64s is ignored: %s", name, reason)


def inconsistent(param: str, message: str) -> PydanticCustomError:
    """The error of parameters that contradict each other; `param` is the one to change."""
    return PydanticCustomError("inconsistent", "{message}", {"message": message, "param": param})


UNSUPPORTED_PARAMS: UnsupportedParams = {
    "use_beam_search": ((False,), "sample `n` choices instead"),
    "structural_tag": ((), "use `tools`, or a grammar in `structured_outputs`"),
    "allowed_token_ids": ((), "use `logit_bias`"),
    "bad_words": (([],), "use `logit_bias`"),
    "logits_processors": (([],), "use `logit_bias`"),
    "vllm_xargs": (({},), "the server has no custom logits processors"),
    "include_stop_str_in_output": ((False,), "append the stop string in the client"),
    "truncation_side": (("left",), "prompts are truncated on the left"),
    "thinking_token_budget": ((), "the model has no such setting"),
    "repetition_detection": ((), "use `repetition_penalty`"),
    "prompt_embeds": ((), "send text or token ids"),
}
"""Parameters that neither generation endpoint supports."""
IGNORED_PARAMS = frozenset(
    {
        "store",
        "service_tier",
        "prompt_cache_retention",
        "request_id",
        "length_penalty",  # of beam search alone
        "spaces_between_special_tokens",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "mm_processor_kwargs",
        "kv_transfer_params",
        "return_tokens_as_token_ids",
        "include_reasoning",
    }
)
"""Parameters that the two generation endpoints ignore."""


class StreamOptions(Body):
    ignored = frozenset({"include_obfuscation"})

    include_usage: bool = False
    """Adds a chunk with the usage of the whole request before `[DONE]`."""
    continuous_usage_stats: bool = False
    """Adds the usage so far to every chunk; needs `include_usage`."""
    include_origins: bool = False
    """Adds `origins` to every choice of a chunk: the origin of each token's text."""
    resumable: bool = False
    """Adds an id to every event. A client that lost its connection sends the request again, to any gateway of the cluster, with
    the last id in the header `Last-Event-ID`; the stream continues after that event."""


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


Grammar = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR)]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]
Schema = dict[str, Any] | Grammar
"""A JSON schema, also as its JSON text."""


class StructuredOutputs(Body):
    """The form of the output, as in vLLM: exactly one of the fields."""

    unsupported: ClassVar[UnsupportedParams] = {
        "structural_tag": ((), "use `tools`, or a grammar"),
        "disable_any_whitespace": ((False,), "white space in JSON is free"),
        "disable_additional_properties": ((False,), "set `additionalProperties` in the schema"),
        "whitespace_pattern": ((), "white space in JSON is free"),
    }
    ignored = frozenset({"disable_fallback"})

    json_: Schema | None = Field(None, alias="json")
    regex: Grammar | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise inconsistent(
                "structured_outputs", "structured_outputs needs exactly one of json, regex, choice, grammar"
            )
        return self


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


FORMS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Parameters that set the form of the output, of which a request has one."""


class GenerationBody(Body):
    """Parameters that chat and text completions share."""

    ignored = IGNORED_PARAMS

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
    logit_bias: Annotated[LogitBias, at_most(MAX_BIASES)] | None = None
    """Values added to logits, by token id as a string."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    """`structured_outputs.json` under its older name, as the next three."""
    guided_regex: Grammar | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    # Identifiers for the client's own use; the server ignores them.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: Annotated[dict[str, str], at_most(MAX_METADATA)] | None = None
    """`category` is the traffic category, like the header X-Paceline-Category."""

    top_k: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    """Candidates per token; 0 or -1 means no limit."""
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, le=MAX_TOKENS)
    """Output tokens before which the text does not end."""
    skip_special_tokens: bool = True
    """Whether the text leaves out special tokens."""
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    """Alternatives reported with each prompt token."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    """Number of prompt tokens to keep, counted from the end. -1 keeps as many as leave room for `max_tokens`."""
    return_token_ids: bool = False
    """Adds the token ids of the prompt and of the output."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    cache_salt: str | None = Field(None, max_length=256)
    """Salt of the prefix cache; requests with different salts share no cached prefix."""
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    """Scheduling priority; lower values run first."""
    timeout: float | None = Field(None, gt=0, le=86400)
    """Time limit in seconds; the server's `request_timeout` also applies."""
    speculation: SpeculationOptions | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise inconsistent("prompt_logprobs", "prompt_logprobs are not streamed: set stream to false")
        return self

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) > 1:
            raise inconsistent(given[1], f"{given[0]} and {given[1]} both set the form of the output: send one of them")
        return self

    @property
    def outputs(self) -> StructuredOutputs | None:
        """`structured_outputs`, under either of its names."""
        guided = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        present = {name: value for name, value in guided.items() if value is not None}
        return StructuredOutputs.model_validate(present) if present else self.structured_outputs

    @property
    def token_limit(self) -> int | None:
        """Most output tokens, as the client sent it."""
        return self.max_tokens

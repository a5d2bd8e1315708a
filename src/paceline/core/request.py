"""A request before and after validation, with its parameters.

`SamplingParams` and `SpeculationParams` are the settings of one request. `SpeculationFlags` are those that an operator changes
at run time.
"""

import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import wraps
from typing import Any, Literal, Self, TypeVar, get_args

from paceline.core.errors import InvalidRequest

Constraint = Mapping[str, Any] | str
"""What an output satisfies: a JSON schema, or the text of a grammar."""

T = TypeVar("T")


def _suggests_names(kind: type[T]) -> type[T]:
    """A decorator of a dataclass: an unknown keyword raises `InvalidRequest` with the most similar field."""
    create = kind.__init__

    @wraps(create)
    def __init__(self: T, *values: Any, **named: Any) -> None:
        try:
            create(self, *values, **named)
        except TypeError:
            known = kind.__dataclass_fields__  # type: ignore[attr-defined]
            unknown = next((name for name in named if name not in known), None)
            if unknown is None:
                raise
            nearest = get_close_matches(unknown, known, n=1)
            advice = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(known)}"
            raise InvalidRequest(f"{kind.__name__} has no {unknown}: {advice}", field=unknown) from None

    kind.__init__ = __init__  # type: ignore[method-assign, assignment]
    return kind


@_suggests_names
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of the target distribution `p` and of where generation stops.

    `temperature=0` is greedy. `top_k=0`, `top_p=1` and `min_p=0` each switch off their truncation.
    If `seed` is None, a seed is drawn when the request is validated. The text depends on seed and model alone.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    """Output tokens before which no end token is sampled and no stop string ends the text."""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of alternatives reported with each token. None if no log-probabilities are reported."""
    prompt_logprobs: int | None = None
    """Number of alternatives reported with each prompt token after the first. The engine then computes the whole prompt,
    without the prefix cache. None if no log-probabilities of the prompt are reported."""
    skip_special_tokens: bool = True
    """Whether the text leaves out special tokens."""
    blocked_ids: tuple[int, ...] = ()
    """End tokens that are not sampled before `min_tokens`; the validator sets them."""
    json_schema: Mapping[str, Any] | None = None
    """JSON schema that the output satisfies; `{}` allows any JSON value."""
    grammar: str | None = None
    """Grammar that the output satisfies, in the Lark syntax of llguidance or in GBNF."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name in ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, int):
                raise InvalidRequest(f"{name} must be an integer, got {value!r}", field=name)
        checks = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"between 0 and max_tokens ({self.max_tokens})"),
            ("temperature", 0.0 <= self.temperature <= 10.0, "between 0 (greedy) and 10"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 10.0, "in (0, 10]"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "in [-2, 2]"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "in [-2, 2]"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "in [0, 2**63)"),
            ("n", 1 <= self.n <= 128, "in [1, 128]"),
            ("stop", all(isinstance(stop, str) and stop for stop in self.stop), "non-empty strings"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "in [0, 20]"),
            ("prompt_logprobs", self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20, "in [0, 20]"),
        )
        for name, good, allowed in checks:
            if not good:
                raise InvalidRequest(f"{name} must be {allowed}, got {getattr(self, name)!r}", field=name)
        if self.json_schema is not None and self.grammar is not None:
            raise InvalidRequest("json_schema and grammar exclude each other: set one of them", field="grammar")
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequest(f"logit_bias[{token}] must be in [-100, 100], got {bias!r}", field="logit_bias")

    @property
    def constraint(self) -> "Constraint | None":
        """The JSON schema or the grammar of the output; None for any text."""
        return self.grammar if self.json_schema is None else self.json_schema

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


Verification = Literal["coupled", "rejection"]

DRAFT_METHODS = {
    "eagle": "an EAGLE head",
    "draft_model": "a draft model",
    "dflash": "a DFlash or DSpark drafter",
    "medusa": "Medusa heads",
}
"""Speculation methods that need `draft`, with what it must be; the first available one is the default."""
METHODS = ("combined", "layer_skip", "lookahead", "ngram", "pool", "suffix", *DRAFT_METHODS)
"""All speculation methods that a server or a cluster can have; `pool` needs a draft pool."""
MAX_DEPTH = 32
"""Upper bound of drafted tokens per sequence and step."""


@_suggests_names
@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """The `speculation` object of the API. None leaves the choice to the server.

    A request may lower what the server offers; it cannot raise it.
    """

    enabled: bool = True
    method: str | None = None
    max_depth: int | None = None
    verification: Verification | None = None

    def __post_init__(self) -> None:
        if self.max_depth is not None and not (isinstance(self.max_depth, int) and self.max_depth >= 0):
            raise InvalidRequest(
                f"max_depth must be an integer, 0 or more, got {self.max_depth!r}", field="speculation.max_depth"
            )
        if self.verification is not None and self.verification not in get_args(Verification):
            raise InvalidRequest(
                f"verification must be one of {', '.join(get_args(Verification))}, got {self.verification!r}",
                field="speculation.verification",
            )


@dataclass(frozen=True, slots=True)
class SpeculationFlags:
    """Run-time settings of an operator. None keeps the value of the configuration; they bound what a request may set."""

    enabled: bool | None = None
    method: str | None = None
    """Method of requests that name none."""
    max_depth: int | None = None
    """Upper bound of the depth. It can lower the configured `max_depth` but not raise it."""

    def __post_init__(self) -> None:
        if self.enabled is not None and not isinstance(self.enabled, bool):
            raise InvalidRequest(f"enabled must be true, false or null, got {self.enabled!r}", field="enabled")
        if self.method is not None and not isinstance(self.method, str):
            raise InvalidRequest(f"method must be a string or null, got {self.method!r}", field="method")
        depth = self.max_depth
        if depth is not None and (not isinstance(depth, int) or isinstance(depth, bool) or not 0 <= depth <= MAX_DEPTH):
            raise InvalidRequest(
                f"max_depth must be an integer in [0, {MAX_DEPTH}] or null, got {depth!r}", field="max_depth"
            )


MAX_CATEGORIES = 32
MAX_NAMED_CATEGORIES = 20
"""Number of categories with names that clients choose. The remaining categories are those that a gateway infers."""
MAX_OWNER_CATEGORIES = 8
"""Number of categories that one API key may name, so that other keys can name some too."""
OTHER_CATEGORY = "other"


@dataclass(frozen=True, slots=True)
class Request:
    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    category: str = "default"
    """Traffic category. Acceptance, depth and circuit breaker are tracked separately for each."""
    priority: int = 0
    """Scheduling priority; a lower number is served first."""
    tenant: str = ""
    """Who shares the steps with others: prompts of one tenant do not slow down those of another. A gateway sets it."""
    weight: float = 1.0
    """Share of the tenant."""
    cache_salt: str = ""
    """Salt of the prefix keys. Requests with different salts never share a cached prefix."""
    committed: tuple[tuple[int, ...] | None, ...] = ()
    """Output tokens that another engine has already committed, one entry per choice; None for a finished choice.
    If it is empty, generation starts after the prompt. These tokens are not returned again."""
    max_cached_tokens: int | None = None
    """Most prompt tokens that may come from the prefix cache. None if there is no limit. A caller that needs the hidden states
    of the remaining tokens sets it, because the cache holds keys and values only."""
    draft: tuple[int, ...] | None = None
    """Tokens that a client drafted. One round verifies them after the committed tokens and ends the request. None if the
    request generates."""
    resume_key: str = ""
    """Key under which a worker keeps the output tokens for a while, so that another gateway can continue. If it is empty,
    the tokens are not kept."""
    trace: str = ""
    """Parent span as a W3C `traceparent`. If it is empty, the request is not traced."""

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Indices of the choices that are still to be generated."""
        committed = self.committed or ((),) * self.sampling.n
        return tuple(choice for choice, tokens in enumerate(committed) if tokens is not None)


@dataclass(frozen=True, slots=True)
class ValidatedRequest(Request):
    """A request after its only validation, with its seed in `sampling.seed`."""

    def __post_init__(self) -> None:
        assert self.sampling.seed is not None, "`ValidatedRequest.of` draws the seed"

    @classmethod
    def of(cls, request: Request) -> Self:
        """The request with its seed, or with a new seed if it has none. The caller has validated the request."""
        values = {request_field.name: getattr(request, request_field.name) for request_field in fields(Request)}
        if request.sampling.seed is None:
            values["sampling"] = replace(request.sampling, seed=draw_seed())
        return cls(**values)

    @property
    def seed(self) -> int:
        assert self.sampling.seed is not None
        return self.sampling.seed


def draw_seed() -> int:
    """A random seed in the range that `SamplingParams.seed` allows."""
    return secrets.randbits(63)


class Categories:
    """A bounded set of traffic categories. Clients choose the names, so their number is not bounded."""

    def __init__(self, limit: int = MAX_CATEGORIES, owner_limit: int = MAX_CATEGORIES) -> None:
        """`owner_limit` is the number of names that one owner may add."""
        self._limit, self._owner_limit = limit, owner_limit
        self._known: set[str] = set()
        self._added: Counter[str] = Counter()

    def fold(self, name: str, owner: str = "") -> str:
        """`name` if it is among the first `limit` names seen, and the first ones of its `owner`; otherwise `other`."""
        if name in self._known:
            return name
        if len(self._known) >= self._limit or self._added[owner] >= self._owner_limit:
            return OTHER_CATEGORY
        self._known.add(name)
        self._added[owner] += 1
        return name

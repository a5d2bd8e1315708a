"""A request, before and after validation."""

import secrets
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import Self

from paceline.core.sampling import SamplingParams
from paceline.core.speculation import SpeculationParams

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

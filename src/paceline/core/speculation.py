"""Speculation settings of one request, and those an operator changes at run time."""

from dataclasses import dataclass
from typing import Literal, get_args

from paceline.core.errors import InvalidRequest

Verification = Literal["coupled", "rejection"]

DRAFT_METHODS = {"eagle": "an EAGLE head", "draft_model": "a draft model", "medusa": "Medusa heads"}
"""Speculation methods that need `draft`, with what it must be; the first available one is the default."""
METHODS = ("combined", "layer_skip", "lookahead", "ngram", "pool", "suffix", *DRAFT_METHODS)
"""All speculation methods that a server or a cluster can have; `pool` needs a draft pool."""
MAX_DEPTH = 32
"""Upper bound of drafted tokens per sequence and step."""


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

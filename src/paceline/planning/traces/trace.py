"""A trace: requests by arrival time, with lengths and shared prefixes."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

from paceline.core.errors import InvalidRequest

BLOCK_TOKENS = 16
"""Tokens of a block of the router's index."""
JITTER_SECONDS = 5.0
"""Largest delay of a copied request in a scaled trace."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrival: float
    """Seconds since the start of the trace."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of the leading full blocks. Two requests with the same id have the same tokens up to the end of that block."""
    copy: int = 0
    """Number of the copy in a scaled trace. Copies share no prefix."""


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    requests: tuple[TraceRequest, ...]
    """By increasing arrival time."""
    block_tokens: int = BLOCK_TOKENS
    """Tokens of one of `TraceRequest.blocks`."""

    def __post_init__(self) -> None:
        if not self.requests:
            raise InvalidRequest(f"trace {self.name} has no requests", field="trace")
        if self.block_tokens < BLOCK_TOKENS or self.block_tokens % BLOCK_TOKENS:
            raise InvalidRequest(
                f"trace {self.name}: blocks must have a multiple of {BLOCK_TOKENS} tokens", field="trace"
            )

    @property
    def seconds(self) -> float:
        """Time of the last arrival."""
        return self.requests[-1].arrival

    def first(self, seconds: float) -> "Trace":
        """The requests that arrive in the first `seconds`."""
        return replace(self, requests=tuple(request for request in self.requests if request.arrival < seconds))

    def scaled(self, factor: float, seed: int = 0) -> "Trace":
        """`factor` times as many requests in the same time.

        Every whole unit of the factor is a copy with its own prefixes, delayed by up to `JITTER_SECONDS` a request. The rest is
        a random subset of one more copy.
        """
        if not isfinite(factor) or factor <= 0.0:
            raise InvalidRequest(f"the scale of a trace must be above 0, got {factor}", field="scale")
        if factor == 1.0:
            return self
        dice, requests = random.Random(seed), []
        copies, rest = divmod(factor, 1.0)
        for copy in range(int(copies) + (rest > 0.0)):
            share = 1.0 if copy < copies else rest
            for request in self.requests:
                if share == 1.0 or dice.random() < share:
                    delay = dice.uniform(0.0, JITTER_SECONDS) if copy else 0.0
                    requests.append(replace(request, arrival=request.arrival + delay, copy=copy))
        requests.sort(key=lambda request: request.arrival)
        return Trace(f"{self.name} x {factor:g}", tuple(requests), self.block_tokens)


def ordered(name: str, requests: Sequence[TraceRequest], block_tokens: int = BLOCK_TOKENS) -> Trace:
    """A trace of requests in any order; the first arrives at 0."""
    start = min((request.arrival for request in requests), default=0.0)
    moved = sorted(
        (replace(request, arrival=request.arrival - start) for request in requests), key=lambda request: request.arrival
    )
    return Trace(name, tuple(moved), block_tokens)

"""The cluster to simulate, and its faults: workers and nodes that are lost, slow links, and acceptance that drifts."""

import math
from dataclasses import dataclass
from math import inf
from typing import Literal

from paceline.core.cluster_config import RouterPolicy
from paceline.core.errors import InvalidConfig, InvalidRequest
from paceline.core.pool_config import Role
from paceline.planning import ROLES, WorkerProfile

FORMS = "worker:NAME@START[-END], node:NAME+NAME@START[-END], link:FACTOR@START[-END] or alpha:FACTOR@START[-END]"


@dataclass(frozen=True, slots=True)
class WorkersLost:
    """Workers stop at `start` with all they hold. Their names are a role and a number: `target-0`, `prefill-1`, `draft-0`."""

    start: float
    workers: tuple[str, ...]
    is_silent: bool = False
    """A failed node closes no connection: gateways notice after missed heartbeats. The end of a process is noticed at once."""
    end: float | None = None
    """Time at which they are ready again. If None, they are ready after a restart."""


@dataclass(frozen=True, slots=True)
class SlowLinks:
    """Between `start` and `end`, transfers and round trips take `factor` times as long."""

    start: float
    factor: float
    end: float = math.inf


@dataclass(frozen=True, slots=True)
class AlphaDrift:
    """Between `start` and `end`, every alpha is multiplied by `factor`."""

    start: float
    factor: float
    end: float = math.inf


Fault = WorkersLost | SlowLinks | AlphaDrift


def parse_fault(text: str) -> Fault:
    """The fault of a command line; see `FORMS`."""
    try:
        kind, colon, rest = text.partition(":")
        what, at, when = rest.rpartition("@")
        if not (colon and at):
            raise ValueError("it has no kind or no time")
        first, _, last = when.partition("-")
        start, end = float(first), float(last) if last else None
        if not (start >= 0.0 and (end is None or end > start)):
            raise ValueError("a fault ends after it starts, and starts at 0 or later")
        if kind in ("worker", "node"):
            return WorkersLost(start, tuple(what.split("+")), kind == "node", end)
        if kind in ("link", "alpha"):
            factor, until = float(what), math.inf if end is None else end
            if not 0.0 < factor < math.inf and not (kind == "alpha" and factor == 0.0):
                raise ValueError("a factor is above 0")
            return SlowLinks(start, factor, until) if kind == "link" else AlphaDrift(start, factor, until)
    except ValueError as error:
        raise InvalidRequest(f"cannot read the fault {text!r} ({error}): give {FORMS}", field="fault") from None
    raise InvalidRequest(f"unknown kind of fault {kind!r}: give {FORMS}", field="fault")


MAX_SPREAD = 4.0
"""Largest standard deviation of the log-odds of acceptance."""

Mode = Literal["closed_form", "stepwise"]
DepthRule = Literal["expected", "policy", "fixed"]
LINK = "100gbe"
"""Usual link of hand-offs."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """How target workers draft."""

    alphas: tuple[float, ...]
    """Conditional acceptance by position, mean over texts; the last one applies to all later positions."""
    max_depth: int = 8
    rule: DepthRule = "expected"
    """`expected` takes the depth with the most expected tokens per second. `policy` asks the production policy `goodput`.
    `fixed` always takes `max_depth`."""
    spread: float = 0.0
    """Standard deviation over texts of the log-odds of acceptance. With 0 all texts have the same alphas."""

    def __post_init__(self) -> None:
        if not self.alphas or not all(0.0 <= alpha <= 1.0 for alpha in self.alphas):
            raise InvalidConfig(f"alpha must be in [0, 1], got {', '.join(f'{alpha:g}' for alpha in self.alphas)}")
        if self.max_depth < 1:
            raise InvalidConfig(f"the largest depth must be at least 1, got {self.max_depth}")
        if not 0.0 <= self.spread <= MAX_SPREAD:
            raise InvalidConfig(f"the spread of alpha must be in [0, {MAX_SPREAD:g}], got {self.spread}")


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    profile: WorkerProfile
    workers: int = 1
    """Target workers at the start."""
    draft_workers: int = 0
    """Number of draft workers that the targets share. With 0 each target drafts on its own device."""
    speculation: Speculation | None = None
    """How targets speculate. It is None if they decode plainly."""
    router: RouterPolicy = "kv_aware"
    mode: Mode = "closed_form"
    """In `closed_form` the steps between two events are one event. In `stepwise` every step is an event with sampled
    acceptance."""
    streams: int | None = None
    """Number of requests in flight, where each end starts the next request. None if requests arrive at their times."""
    ramp_seconds: float = 0.0
    """Time between the first requests of two streams."""
    seed: int = 0
    prefill_workers: int = 0
    """Workers that compute long prompts for the targets; they have the profile and the price of a target."""
    link: str = LINK
    """Kind of link, of those of the profile, that hand-offs use."""
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if self.workers < 1 or min(self.draft_workers, self.prefill_workers) < 0:
            raise InvalidConfig(
                f"a simulation needs a target worker, got {self.workers}, {self.draft_workers} draft workers and "
                f"{self.prefill_workers} prefill workers"
            )
        if self.draft_workers and self.speculation is None:
            raise InvalidConfig("draft workers need an alpha: give --alpha, or no draft workers")
        if self.speculation is not None and self.speculation.rule == "policy" and self.mode == "closed_form":
            raise InvalidConfig("the production policy decides in every step: use the stepwise mode")
        if self.streams is not None and self.streams < 1:
            raise InvalidConfig(f"streams must be at least 1, got {self.streams}")
        if not 0.0 <= self.ramp_seconds < inf:
            raise InvalidConfig(f"the time between two streams must be at least 0, got {self.ramp_seconds}")
        if self.prefill_workers and self.link not in self.profile.links:
            known = ", ".join(self.profile.links) or "none"
            raise InvalidConfig(f"profile {self.profile.name} has no link {self.link!r}; it has: {known}")
        names = {f"{role}-{i}" for role in ROLES for i in range(self.count(role))}
        for fault in self.faults:
            unknown = set(fault.workers) - names if isinstance(fault, WorkersLost) else set()
            if unknown:
                raise InvalidConfig(f"a fault names {', '.join(sorted(unknown))}, but the workers are {_shown(names)}")

    def count(self, role: Role) -> int:
        """Workers of a role at the start."""
        return {"target": self.workers, "prefill": self.prefill_workers, "draft": self.draft_workers}[role]

    def price(self, role: Role) -> float:
        """Dollars per hour of one worker."""
        return (self.profile.draft_price_per_hour if role == "draft" else self.profile.price_per_hour).value

    @property
    def price_per_hour(self) -> float:
        """Dollars of all workers at the start."""
        return sum(self.count(role) * self.price(role) for role in ROLES)


def _shown(names: set[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered) if len(ordered) <= 8 else f"{ordered[0]} to {ordered[-1]}"

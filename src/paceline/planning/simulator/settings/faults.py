"""Faults of a simulation: workers and nodes that are lost, slow links, and acceptance that drifts."""

import math
from dataclasses import dataclass

from paceline.core.errors import InvalidRequest

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

"""Which target worker a request goes to. Pure: loads in, a name out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.cluster_config import RouterPolicy


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What is known of a worker that may be chosen."""

    name: str
    assigned: int
    """Sequences sent to it and not finished, those on the way included."""
    seats: int
    """Sequences it runs at once."""
    kv_use: float = 0.0
    """Used share of its cache, 0 to 1, as it last said."""
    kv_tokens: int = 0
    """That its cache holds; 0: not known."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be placed."""

    ids: Sequence[int]
    salt: str = ""
    """The tenant's: cached prefixes of another salt do not count."""
    request_id: str = ""
    """Under which `started` and `ended` will be told; empty if they will not."""


class Router(Protocol):
    def choose(self, prompt: Prompt, workers: Sequence[WorkerLoad]) -> str:
        """The name of one of `workers`, of which there is at least one; they come in any order."""
        ...

    def started(self, request_id: str, cached: int) -> None:
        """Its first token came, and so many of its prompt's had been cached. May be said again."""
        ...

    def ended(self, request_id: str) -> None:
        """It left its worker: finished, cancelled, or to be placed anew."""
        ...


class LoadRouter:
    """Goes by the loads it is given, and remembers no request."""

    def started(self, request_id: str, cached: int) -> None:
        pass

    def ended(self, request_id: str) -> None:
        pass


class RoundRobin(LoadRouter):
    """One after the other, by name."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, prompt: Prompt, workers: Sequence[WorkerLoad]) -> str:
        names = sorted(worker.name for worker in workers)
        self._last = next((name for name in names if name > self._last), names[0])
        return self._last


class LeastLoaded(LoadRouter):
    """The one with the smallest share of its seats taken; of equals the one with more cache left, then the first by name."""

    def choose(self, prompt: Prompt, workers: Sequence[WorkerLoad]) -> str:
        return min(workers, key=lambda worker: (worker.assigned / worker.seats, worker.kv_use, worker.name)).name


def make_router(policy: RouterPolicy) -> Router:
    """Of the policies that know nothing but loads."""
    return RoundRobin() if policy == "round_robin" else LeastLoaded()

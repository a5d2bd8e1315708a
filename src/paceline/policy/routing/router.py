"""Routers choose the target worker of a request. Pure: loads in, a name out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

from paceline.core.cluster_config import RouterPolicy


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Load of a worker that may be chosen."""

    name: str
    assigned: int
    """Unfinished sequences assigned to it, including those in transit."""
    max_num_seqs: int
    """Sequences that it runs at once."""
    kv_use: float = 0.0
    """Used share of its KV cache, 0 to 1, as of its last heartbeat."""
    kv_tokens: int = 0
    """Capacity of its KV cache. 0 if it is not known."""


class WorkerTable(Sequence[WorkerLoad]):
    """Loads of many workers, changed one by one. A router that reads `take_changes` need not compare all of them for every
    request; so a table belongs to one router."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.assigned: list[int] = []
        self.max_num_seqs: list[int] = []
        self.kv_use: list[float] = []
        self.kv_tokens: list[int] = []
        """The fields of `WorkerLoad`, by position."""
        self._positions: dict[str, int] = {}
        self._changes: set[int] = set()
        self.generation = 0
        """Number of times that workers joined or left; positions are valid within one."""

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> WorkerLoad: ...
    @overload
    def __getitem__(self, index: slice) -> list[WorkerLoad]: ...
    def __getitem__(self, index: int | slice) -> WorkerLoad | list[WorkerLoad]:
        if isinstance(index, slice):
            return [self[at] for at in range(len(self.names))[index]]
        return WorkerLoad(
            self.names[index],
            self.assigned[index],
            self.max_num_seqs[index],
            self.kv_use[index],
            self.kv_tokens[index],
        )

    def has(self, name: str) -> bool:
        return name in self._positions

    def set(self, load: WorkerLoad) -> None:
        """The present load of a worker, which joins if it is new."""
        at = self._positions.get(load.name)
        fields = load.name, load.assigned, load.max_num_seqs, load.kv_use, load.kv_tokens
        if at is None:
            self._positions[load.name] = len(self.names)
            for column, value in zip(self._columns(), fields, strict=True):
                column.append(value)
            self.generation += 1
        else:
            for column, value in zip(self._columns(), fields, strict=True):
                column[at] = value
            self._changes.add(at)

    def assign(self, name: str, assigned: int) -> None:
        """The worker has `assigned` sequences now. A name without a worker is ignored."""
        at = self._positions.get(name)
        if at is not None:
            self.assigned[at] = assigned
            self._changes.add(at)

    def remove(self, name: str) -> None:
        """The worker leaves. A name without a worker is ignored."""
        at = self._positions.pop(name, None)
        if at is not None:
            for column in self._columns():
                del column[at]
            self._positions = {other: number for number, other in enumerate(self.names)}
            self.generation += 1

    def _columns(self) -> tuple[list[Any], ...]:
        return self.names, self.assigned, self.max_num_seqs, self.kv_use, self.kv_tokens

    def take_changes(self) -> Sequence[int]:
        """Positions of the loads that were set since the last call."""
        changes, self._changes = tuple(self._changes), set()
        return changes


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """A prompt to be routed."""

    ids: Sequence[int]
    salt: str = ""
    """Salt of the tenant. Cached prefixes of another salt do not match."""
    request_id: str = ""
    """Id for `started` and `ended`; empty if neither will be called."""


class Router(Protocol):
    def choose(self, prompt: RoutedPrompt, workers: Sequence[WorkerLoad]) -> str:
        """The name of one of `workers`. There is at least one, in any order."""
        ...

    def started(self, request_id: str, cached: int) -> None:
        """The first token arrived; the prefix cache held `cached` tokens of the prompt. May be called again."""
        ...

    def ended(self, request_id: str) -> None:
        """The request left its worker: finished, cancelled, or to be routed again."""
        ...


class LoadRouter:
    """Base of routers that use loads only and keep no state of requests."""

    def started(self, request_id: str, cached: int) -> None:
        pass

    def ended(self, request_id: str) -> None:
        pass


class RoundRobin(LoadRouter):
    """Chooses workers in turn, by name."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, prompt: RoutedPrompt, workers: Sequence[WorkerLoad]) -> str:
        names = sorted(worker.name for worker in workers)
        self._last = next((name for name in names if name > self._last), names[0])
        return self._last


class LeastLoaded(LoadRouter):
    """Chooses the smallest `assigned / max_num_seqs`; ties go to the freer KV cache, then to the first name."""

    def choose(self, prompt: RoutedPrompt, workers: Sequence[WorkerLoad]) -> str:
        return min(workers, key=lambda worker: (worker.assigned / worker.max_num_seqs, worker.kv_use, worker.name)).name


def make_router(policy: RouterPolicy) -> Router:
    """The router of a policy that uses loads only."""
    return RoundRobin() if policy == "round_robin" else LeastLoaded()

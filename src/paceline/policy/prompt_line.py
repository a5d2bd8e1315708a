"""Decides in which order prompts get the rows of a step. The engine and the simulator share the order.

A lower priority number goes first. Tenants of one priority share the rows by their weights: a tenant has a counter of the rows
that its prompts got, divided by its weight, and the smallest counter is next (Sheng et al., OSDI 2024). The prompts of a tenant
go shortest first, by the rows that are left. Prompts of about the same length keep the order of their arrival.

No prompt starves. The prompt of a tenant that has waited longest is owed a row for every `AGEING` rows that later prompts of
the tenant got, and takes them first once they are a quarter of a step.
"""

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import merge
from operator import itemgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

SHORT_ROWS = 256
"""Prompts with up to this many rows to compute are equally short. From there on, a class is twice as long as the one before."""
AGEING = 4
"""Rows of later prompts for which the oldest prompt is owed one."""
TURNS = 4
"""Parts of a step that tenants take in turn. The smallest number of rows owed to a prompt that are paid is one part."""
LEAST_TURN = 16
"""Fewest rows of a part, the tokens of a cache block."""
MOST_NEW = 1024
"""Most prompts of a tenant that is alone which are considered in a step: thousands may wait."""


class Prompt(Protocol):
    """A sequence with prompt tokens to compute."""

    @property
    def id(self) -> int: ...

    @property
    def num_uncomputed(self) -> int:
        """Rows that are left."""
        ...

    @property
    def arrival(self) -> float: ...

    @property
    def priority(self) -> int: ...

    @property
    def tenant(self) -> str:
        """Who shares the steps with others, such as the owner of an API key."""
        ...

    @property
    def weight(self) -> float:
        """Share of the tenant."""
        ...


P = TypeVar("P", bound=Prompt)


class Turn(NamedTuple, Generic[P]):
    """`prompt` may take up to `most` rows now."""

    prompt: P
    most: int
    is_owed: bool = False
    """Whether the prompt is before its place because it has waited longest."""


def length_class(rows: int) -> int:
    """Prompts of one class keep the order of their arrival."""
    return ((rows - 1) // SHORT_ROWS).bit_length() if rows > SHORT_ROWS else 0


def rank(prompt: Prompt) -> tuple[int, float, int]:
    """Order of arrival within a priority."""
    return prompt.priority, prompt.arrival, prompt.id


_Key = tuple[int, int, float, int]


def _key(prompt: Prompt, rows: int) -> _Key:
    return prompt.priority, length_class(rows), prompt.arrival, prompt.id


class PromptLine(Generic[P]):
    """Prompts that have not begun, and what the prompts of all tenants got."""

    def __init__(self) -> None:
        self._waiting: list[tuple[_Key, P]] = []
        self._ranked: list[tuple[tuple[int, float, int], P]] = []
        """The same prompts in order of their arrival."""
        self._keys: dict[int, _Key] = {}
        self._tenants = Counter[str]()
        self.served: dict[str, float] = {}
        """Rows by weight that the tenants with prompts got, since they have some."""
        self.owed: dict[int, float] = {}
        """Rows owed to prompts that have waited longest."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[P]:
        """The prompts that have not begun in their order, without regard to tenants."""
        return (prompt for _, prompt in self._waiting)

    def add(self, prompt: P, rows: int) -> None:
        """The prompt waits. `rows` is the number of rows that it will compute, as far as it is known."""
        key = self._keys[prompt.id] = _key(prompt, rows)
        bisect.insort(self._waiting, (key, prompt))  # keys differ: prompts are not compared
        bisect.insort(self._ranked, (rank(prompt), prompt))
        self._tenants[prompt.tenant] += 1

    def begin(self, prompt: P) -> None:
        """The prompt no longer waits."""
        key = self._keys.pop(prompt.id)
        del self._waiting[bisect.bisect_left(self._waiting, (key,))]
        del self._ranked[bisect.bisect_left(self._ranked, (rank(prompt),))]
        self._tenants[prompt.tenant] -= 1
        if not self._tenants[prompt.tenant]:
            del self._tenants[prompt.tenant]

    def discard(self, prompt: P) -> None:
        """The prompt has ended, whether it waits or not."""
        if prompt.id in self._keys:
            self.begin(prompt)
        self.owed.pop(prompt.id, None)

    def has_begun(self, prompt: P) -> bool:
        return prompt.id not in self._keys

    def may_be_passed(self, prompt: P) -> bool:
        """Whether later prompts may begin although this one finds no room: not if as many of their rows have gone first that it
        is owed all of its own."""
        return self.owed.get(prompt.id, 0.0) < prompt.num_uncomputed

    @property
    def next(self) -> P | None:
        """The prompt that begins next. None if none waits."""
        if not self._waiting:
            return None
        oldest = self._ranked[0][1]
        return self._waiting[0][1] if self.may_be_passed(oldest) else oldest

    def turns(self, begun: Iterable[P], rows: int, may_begin: bool = True) -> "PromptTurns[P]":
        """The turns of a step with `rows` prompt rows. `begun` are the prompts of which some rows are computed. `may_begin` is
        false if no other gets a turn."""
        by_tenant = {tenant: _Candidates[P]([], []) for tenant in self._tenants} if may_begin else {}
        for prompt in begun:
            by_tenant.setdefault(prompt.tenant, _Candidates([], [])).begun.append((self._key(prompt), prompt))
        if may_begin and len(self._tenants) == 1:
            (only,) = self._tenants
            by_tenant[only].waiting.extend(self._waiting[:MOST_NEW])
        elif may_begin:
            for entry in self._waiting:
                by_tenant[entry[1].tenant].waiting.append(entry)
        first = min([self.served[tenant] for tenant in by_tenant if tenant in self.served], default=0.0)
        self.served = {tenant: self.served.get(tenant, first) for tenant in by_tenant}  # idle time earns nothing
        queues = [self._queue(tenant, candidates) for tenant, candidates in by_tenant.items()]
        return PromptTurns(self, queues, rows)

    def _key(self, prompt: P) -> _Key:
        return self._keys.get(prompt.id) or _key(prompt, prompt.num_uncomputed)

    def _queue(self, tenant: str, candidates: "_Candidates[P]") -> "_Queue[P]":
        candidates.begun.sort(key=itemgetter(0))
        if len(self._tenants) == 1 and candidates.waiting:
            waiting = [self._ranked[0][1]]
        else:
            waiting = [prompt for _, prompt in candidates.waiting]
        oldest = min((*waiting, *[prompt for _, prompt in candidates.begun]), key=rank)
        prompts = (prompt for _, prompt in merge(candidates.begun, candidates.waiting, key=itemgetter(0)))
        return _Queue(tenant, prompts, oldest, next(prompts))


class _Candidates(NamedTuple, Generic[P]):
    """The prompts of a tenant with their keys; `waiting` in order."""

    begun: list[tuple[_Key, P]]
    waiting: list[tuple[_Key, P]]


@dataclass(slots=True, eq=False)
class _Queue(Generic[P]):
    """The prompts of one tenant in a step."""

    tenant: str
    prompts: Iterator[P]
    oldest: P
    head: P
    is_paid: bool = False
    """Whether the oldest prompt has got what it is owed."""


class PromptTurns(Generic[P]):
    """Gives out the rows of one step: `next` says whose turn it is, `took` how many rows that prompt got."""

    def __init__(self, line: PromptLine[P], queues: list[_Queue[P]], rows: int) -> None:
        self._line, self._queues = line, queues
        self._by_tenant = {queue.tenant: queue for queue in queues}
        self._part = max(LEAST_TURN, rows // TURNS)
        self._over: set[int] = set()
        """Prompts that get nothing more in this step."""
        self._refused: list[P] = []
        self._is_closed = False

    def next(self, rows: int) -> Turn[P] | None:
        """Whose turn it is while `rows` are left. None if no prompt wants them."""
        if rows <= 0 or not self._queues:
            return None
        queue = self._queues[0]
        if len(self._queues) > 1:
            served = self._line.served
            queue = min(self._queues, key=lambda queue: (queue.head.priority, served[queue.tenant], queue.tenant))
        oldest, owed = queue.oldest, int(self._line.owed.get(queue.oldest.id, 0.0))
        if owed >= min(self._part, oldest.num_uncomputed) and not queue.is_paid and self._may_take(oldest):
            queue.is_paid = True
            return Turn(oldest, min(rows, owed), is_owed=True)
        return Turn(queue.head, rows if len(self._queues) == 1 else min(rows, self._part))

    def took(self, prompt: P, rows: int, is_over: bool) -> None:
        """The prompt got `rows` rows. `is_over` is true if it gets no more in this step: it is complete, or has to wait."""
        line, queue = self._line, self._by_tenant[prompt.tenant]
        line.served[prompt.tenant] += rows / prompt.weight
        if rows:
            line.owed[prompt.id] = max(0.0, line.owed.get(prompt.id, 0.0) - rows)
            for other in {queue.oldest, *self._refused} - {prompt}:
                if other.priority == prompt.priority:
                    line.owed[other.id] = line.owed.get(other.id, 0.0) + rows / AGEING
        if is_over:
            self._over.add(prompt.id)
            self._advance(queue)

    def refuse(self, turn: Turn[P]) -> bool:
        """There is no room for the prompt, which would begin. Whether other prompts may begin in this step. Those of its tenant
        do not, if it is in its place: they are longer. `took` follows."""
        self._refused.append(turn.prompt)
        if not turn.is_owed:
            self._keep_begun(self._by_tenant[turn.prompt.tenant])
        return self._line.may_be_passed(turn.prompt)

    def close(self) -> None:
        """No further prompt begins in this step."""
        if not self._is_closed:
            self._is_closed = True
            for queue in tuple(self._queues):
                self._keep_begun(queue)
                self._advance(queue)

    def _keep_begun(self, queue: _Queue[P]) -> None:
        queue.prompts = iter([prompt for prompt in queue.prompts if self._line.has_begun(prompt)])

    def _may_take(self, prompt: P) -> bool:
        return prompt.id not in self._over and (not self._is_closed or self._line.has_begun(prompt))

    def _advance(self, queue: _Queue[P]) -> None:
        """Make the next prompt that may take rows the head of its queue."""
        while queue in self._queues and not self._may_take(queue.head):
            head = next(queue.prompts, None)
            if head is None:
                self._queues.remove(queue)
            else:
                queue.head = head

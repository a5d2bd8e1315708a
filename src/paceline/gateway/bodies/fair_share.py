"""Fair shares of what requests need before they are admitted: memory for bodies, and threads that check and encode.

An owner is an API key, or an address if the server needs no key. `FairShare` serves the waiting owners by what they were
served: next is the owner with the least cost, divided by the weight of its key. An owner holds a part of the whole at most, so
one owner's work never takes the place of all others. What waits is bounded, and leaves when its task is cancelled.

`CpuBudgets` bounds the processor time of an owner for checks of bodies, chat templates, encoding and checks of schemas. Work is
charged after it was done. An owner that has no time left is refused before its next body is read.
"""

import asyncio
import math
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from starlette.types import Scope

from paceline.gateway.api.errors import Overloaded, RateLimited
from paceline.gateway.auth import ApiKey, network_of
from paceline.policy.overload import Allowance

Result = TypeVar("Result")

MAX_WAITING = 256
"""Requests that wait for one kind of share; a further one, or the newest of the owner that waits most, is refused."""
RETRY_SECONDS = 1


class Owner(NamedTuple):
    """Who pays for the work of a request."""

    id: str
    weight: float = 1.0


def owner_of(scope: Scope) -> Owner:
    """The owner of a request: its API key, or its address if the server needs no key."""
    key: ApiKey = scope["state"]["key"]
    if key.id:
        return Owner(key.id, key.share.weight)
    return Owner(f"address {network_of((scope.get('client') or ('',))[0])}")


class _Place:
    """One request that waits for a share, or holds it."""

    def __init__(self, owner: Owner, amount: int, cost: float) -> None:
        self.owner, self.amount, self.cost = owner, amount, cost
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class FairShare:
    """A capacity that owners share. All calls must come from one event loop at a time."""

    def __init__(self, capacity: int, per_owner: int, max_waiting: int = MAX_WAITING) -> None:
        """`per_owner` is the most that one owner holds at a time."""
        self._capacity, self._per_owner, self._max_waiting = capacity, per_owner, max_waiting
        self._waiting: dict[str, deque[_Place]] = {}
        self._held: Counter[str] = Counter()
        self._served: dict[str, float] = {}
        """Cost of what each owner was served, divided by its weight; only of owners that wait or hold."""

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def held(self) -> int:
        """The sum of what all owners hold."""
        return self._held.total()

    async def enter(self, owner: Owner, amount: int, cost: float | None = None) -> Callable[[], None]:
        """Waits for `amount` of the capacity, and returns the function that gives it back. `cost` is what the owner is
        charged; the default is the amount. Raises `Overloaded` if too many wait."""
        place = _Place(owner, min(amount, self._per_owner), amount if cost is None else cost)
        self._make_room(owner)
        if owner.id not in self._served:  # idle time earns nothing
            self._served[owner.id] = min(self._served.values(), default=0.0)
        self._waiting.setdefault(owner.id, deque()).append(place)
        self._grant()
        try:
            await place.granted
        except BaseException:
            if place.granted.done() and not place.granted.cancelled() and place.granted.exception() is None:
                self._leave(place)
            else:
                self._drop(place)
            raise
        return lambda: self._leave(place)

    def _make_room(self, owner: Owner) -> None:
        if self.num_waiting < self._max_waiting:
            return
        most = max(self._waiting, key=lambda other: len(self._waiting[other]))
        if len(self._waiting[most]) <= len(self._waiting.get(owner.id, ())) + 1:
            raise _full()
        place = self._waiting[most][-1]
        self._drop(place)
        place.granted.set_exception(_full())

    def _grant(self) -> None:
        while True:
            able = [
                owner
                for owner, places in self._waiting.items()
                if self._held[owner] + places[0].amount <= self._per_owner
            ]
            if not able:
                return
            owner = min(able, key=lambda name: (self._served[name], self._held[name]))
            place = self._waiting[owner][0]
            if place.granted.done():  # its task was cancelled and has not run since
                self._remove(place)
                continue
            if self.held + place.amount > self._capacity:  # the next one is not overtaken by smaller ones
                return
            self._remove(place)
            self._held[owner] += place.amount
            self._served[owner] += place.cost / place.owner.weight
            place.granted.set_result(None)

    def _leave(self, place: _Place) -> None:
        self._held[place.owner.id] -= place.amount
        if not self._held[place.owner.id]:
            del self._held[place.owner.id]
        self._forget(place.owner.id)
        self._grant()

    def _drop(self, place: _Place) -> None:
        """Ends the wait of a place, if it still waits."""
        if place in self._waiting.get(place.owner.id, ()):
            self._remove(place)
            self._grant()
        self._forget(place.owner.id)

    def _remove(self, place: _Place) -> None:
        places = self._waiting[place.owner.id]
        places.remove(place)
        if not places:
            del self._waiting[place.owner.id]

    def _forget(self, owner: str) -> None:
        if owner not in self._waiting and owner not in self._held:
            self._served.pop(owner, None)


class FairThreads:
    """Threads that work for owners in fair turns. Work that has not started ends with the task that waits for it; a place is
    free again when its thread is."""

    def __init__(self, count: int, per_owner: int, name: str) -> None:
        self._share = FairShare(count, per_owner)
        self._threads = ThreadPoolExecutor(count, name)

    @property
    def num_waiting(self) -> int:
        return self._share.num_waiting

    @property
    def num_running(self) -> int:
        return self._share.held

    async def run(self, owner: Owner, cost: float, function: Callable[..., Result], *args: Any) -> Result:
        """The result of `function`, run on a thread. `cost` is what the owner is charged for it."""
        leave = await self._share.enter(owner, 1, cost)
        loop = asyncio.get_running_loop()
        work = self._threads.submit(function, *args)
        work.add_done_callback(lambda _: _call_on(loop, leave))
        return await asyncio.wrap_future(work)

    def submit(self, function: Callable[[], Any]) -> Any:
        """Runs `function` on a thread without an owner. Returns its future."""
        return self._threads.submit(function)


MAX_OWNERS = 10_000
"""Owners that are remembered; the one that was longest without work is forgotten first."""


class CpuBudgets:
    """Thread-safe. `clock` returns the time."""

    def __init__(self, per_minute: float | None, clock: Callable[[], float]) -> None:
        """`per_minute` is the number of seconds for an owner of weight 1. If it is None, nothing is limited."""
        self._per_minute, self._clock = per_minute, clock
        self._lock = threading.Lock()
        self._allowances: OrderedDict[str, Allowance] = OrderedDict()

    def check(self, owner: Owner) -> None:
        """Raises `RateLimited` if the owner has no time left."""
        with self._lock:
            allowance = self._allowances.get(owner.id)
            if allowance is None:
                return
            seconds = allowance.wait_seconds(0, self._clock())
        if seconds > 0.0:
            raise RateLimited(
                f"this key or address may use {allowance.per_minute:g} seconds of the gateway's processors per minute",
                math.ceil(seconds),
                code="cpu_budget",
            )

    def charge(self, owner: Owner, seconds: float) -> None:
        if self._per_minute is None:
            return
        with self._lock:
            now = self._clock()
            allowance = self._allowances.pop(owner.id, None) or Allowance(self._per_minute * owner.weight, now)
            allowance.take(seconds, now)
            self._allowances[owner.id] = allowance
            if len(self._allowances) > MAX_OWNERS:
                self._allowances.popitem(last=False)


def _call_on(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:  # the loop has ended
        function()


def _full() -> Overloaded:
    return Overloaded(RETRY_SECONDS, "too many requests wait for their turn")

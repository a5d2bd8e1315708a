"""Between HTTP and the engine: who is let in, how long they may take, and what happens when they leave.

Lives on one event loop. The engine's thread only ever appends to the inbox and, at most once a burst, wakes the loop.
"""

import asyncio
import itertools
import math
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from paceline.core.errors import PacelineError
from paceline.core.output import StepOutput
from paceline.core.request import Request
from paceline.engine.loop import Event
from paceline.server.config.config import ServerConfig
from paceline.server.config.flags import FlagStore
from paceline.server.gateway.backend import Backend
from paceline.server.gateway.output_stream import Ticket
from paceline.server.metrics.metrics import Metrics
from paceline.server.openai.errors import BadRequest, ClientGone, Overloaded, TimedOut, Unavailable

MAX_RETRY_AFTER = 60
REMEMBERED_FINISHES = 64


class Gateway:
    """Admits requests to the engine and hands out tickets for them."""

    def __init__(self, llm: Backend, config: ServerConfig, metrics: Metrics, flags: FlagStore) -> None:
        self.llm = llm
        self.config = config
        self.metrics = metrics
        self.flags = flags
        self.draining = False
        self._numbers = itertools.count()
        self._tickets: set[Ticket] = set()
        self._by_request: dict[str, Ticket] = {}
        self._taken = 0  # choices admitted and not finished
        self._finishes: deque[float] = deque(maxlen=REMEMBERED_FINISHES)
        self._inbox: deque[tuple[str, Event]] = deque()
        self._awake = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def num_waiting(self) -> int:
        """Choices admitted beyond the engine's seats."""
        return max(0, self._taken - self.llm.seats)

    @property
    def is_ready(self) -> bool:
        return self.llm.is_ready and not self.draining

    def request_id(self) -> str:
        return f"http-{next(self._numbers)}"

    @asynccontextmanager
    async def submit(self, requests: Sequence[Request], timeout: float | None = None) -> AsyncIterator[Ticket]:
        """Start `requests` together, or raise: refused ones, when full, when draining. Leaving the block gives up what
        is unfinished, within a step."""
        self._loop = asyncio.get_running_loop()
        seconds = self.config.request_timeout if timeout is None else min(timeout, self.config.request_timeout)
        self.check_room(sum(request.sampling.n for request in requests))
        ticket = Ticket(requests)
        self._open(ticket)
        alarm = self._loop.call_later(seconds, ticket.fail, TimedOut(seconds))
        try:
            for request in requests:
                await self._start(ticket, request)
            yield ticket
        finally:
            alarm.cancel()
            self._close(ticket)

    async def drain(self) -> bool:
        """Let nobody in any more and wait for those inside, `drain_timeout` at the most; then give them up.
        Returns whether all could finish."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), self.config.drain_timeout)
        except TimeoutError:
            self.abort()
            return False
        return True

    def abort(self) -> None:
        """Give up everything now; every caller is told."""
        self.draining = True
        for ticket in self._tickets:
            ticket.fail(Unavailable("the server was shut down before the request was finished"))

    def check_room(self, choices: int) -> None:
        """Raise what `submit` would for so many choices, before any work was put into them."""
        if not self.llm.is_running:
            raise Unavailable("the engine has stopped; the server's log says why")
        if self.draining:
            self.metrics.rejected("draining")
            raise Unavailable("the server is shutting down: send this elsewhere")
        seats = self.llm.seats
        waiting = seats // 4 if self.config.max_waiting is None else self.config.max_waiting
        capacity = seats + waiting
        if choices > capacity:
            raise BadRequest(
                f"{choices} choices at once are more than this server ever holds ({capacity}): ask for fewer",
                param="n",
                code="invalid_value",
            )
        if self._taken + choices > capacity:
            self.metrics.rejected("overloaded")
            raise Overloaded(self._retry_after())

    def _retry_after(self) -> int:
        """Seconds until the queue will have emptied, at the rate at which choices have been finishing."""
        if len(self._finishes) < 2:
            return 1
        seconds = (self._finishes[-1] - self._finishes[0]) / (len(self._finishes) - 1)
        return max(1, min(MAX_RETRY_AFTER, math.ceil(seconds * self.num_waiting)))

    async def _start(self, ticket: Ticket, request: Request) -> None:
        """Submitting checks the request. Compiling a grammar may take a while, so that is done aside, and then found ready."""
        request_id = request.id

        def listen(event: Event) -> None:  # on the engine's thread
            self._inbox.append((request_id, event))
            if not self._awake:
                self._awake = True
                assert self._loop is not None
                self._loop.call_soon_threadsafe(self._read_inbox)

        if request.sampling.json_schema is not None:
            await asyncio.to_thread(self.llm.validate, request)
        self.llm.submit(request, listen)
        self._by_request[request.id] = ticket
        self.metrics.submitted(request)

    def _read_inbox(self) -> None:
        self._awake = False  # before reading: what is appended from here on wakes the loop again
        assert self._loop is not None
        now = self._loop.time()
        while self._inbox:
            request_id, event = self._inbox.popleft()
            ticket = self._by_request.get(request_id)
            if ticket is None:  # given up a moment ago
                continue
            if isinstance(event, PacelineError):
                ticket.fail(event)
                continue
            self._count(ticket, event, now)
            ticket.put(event)

    def _count(self, ticket: Ticket, output: StepOutput, now: float) -> None:
        request = ticket.requests[output.request_id]
        self.metrics.output(request, output, now)
        if output.finish_reason is None:
            return
        self._release(1)
        self._finishes.append(now)
        ticket.unfinished[request.id] -= 1
        if ticket.unfinished[request.id] == 0:
            del ticket.unfinished[request.id], self._by_request[request.id]
            self.metrics.finished(request, output.finish_reason.value, now)

    def _open(self, ticket: Ticket) -> None:
        self._tickets.add(ticket)
        self._taken += ticket.num_unfinished
        self._idle.clear()

    def _close(self, ticket: Ticket) -> None:
        assert self._loop is not None
        reason = "cancelled" if ticket.error is None or isinstance(ticket.error, ClientGone) else "error"
        for request_id in ticket.unfinished:
            if self._by_request.pop(request_id, None) is not None:  # otherwise it was refused
                self.llm.cancel(request_id)
                self.metrics.finished(ticket.requests[request_id], reason, self._loop.time())
        self._release(ticket.num_unfinished)
        ticket.unfinished.clear()
        self._tickets.discard(ticket)
        if not self._tickets:
            self._idle.set()
            self._finishes.clear()  # the pause that begins here says nothing about the next rush

    def _release(self, choices: int) -> None:
        self._taken -= choices

"""The gateway between HTTP and the target: admission, deadlines, cancellation and draining.

All methods of `Gateway` run on one event loop. `Inbox` passes the events of all requests from the target's thread to that loop.
`OutputStream` passes the step outputs of one session to its response.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

from paceline.core.errors import PacelineError
from paceline.core.machine import measured
from paceline.core.output import OutputEvent, OutputListener, StepOutput
from paceline.core.request import MAX_NAMED_CATEGORIES, MAX_OWNER_CATEGORIES, Categories, Request, ValidatedRequest
from paceline.core.sequence import FinishReason
from paceline.gateway.api.errors import BadRequest, ClientDisconnected, Overloaded, RequestTimeout, Unavailable
from paceline.gateway.audit import StrictMode
from paceline.gateway.auth import ApiKey, RateLimits
from paceline.gateway.bodies import CpuBudgets, FairThreads, Owner
from paceline.gateway.config import FlagStore, ServerConfig
from paceline.gateway.metrics import Metrics
from paceline.gateway.sessions.admission import (
    OUTPUT_COST,
    AdmissionEntry,
    AdmissionLimits,
    AdmissionQueue,
    RetryAfter,
    kv_needed,
)
from paceline.gateway.sessions.samples import SampleRing
from paceline.targets import TargetClient


class Inbox:
    """The target's thread only appends an event, and wakes the event loop once per burst."""

    def __init__(self, on_events: Callable[[], None]) -> None:
        """`on_events` is called on the event loop and reads `take`."""
        self._on_events = on_events
        self._events: deque[tuple[str, OutputEvent]] = deque()
        self._is_awake = False

    def listener_of(self, request_id: str, loop: asyncio.AbstractEventLoop) -> OutputListener:
        """Takes the outputs and the error of a request, from any thread."""

        def listen(event: OutputEvent) -> None:
            self._events.append((request_id, event))
            if not self._is_awake:
                self._is_awake = True
                loop.call_soon_threadsafe(self._on_events)

        return listen

    def take(self) -> Iterator[tuple[str, OutputEvent]]:
        """Events with the id of their request, in order, until none is left."""
        self._is_awake = False  # before reading: an event that arrives from here on wakes the loop again
        while self._events:
            yield self._events.popleft()


class OutputStream:
    """Step outputs of the admitted requests of one session. The gateway writes, the session reads, on the event loop."""

    def __init__(
        self, requests: Sequence[ValidatedRequest], entries: Sequence[AdmissionEntry], deadline: float
    ) -> None:
        """`entries` are the places of the requests in the queue, in the same order."""
        self.deadline = deadline
        """Time of the event loop at which the stream fails."""
        self.entries = {entry.id: entry for entry in entries}
        self.requests = {request.id: request for request in requests}
        self.unfinished = {request.id: len(request.unfinished) for request in requests}
        """Number of unfinished choices by request id; finished requests are absent."""
        self.error: PacelineError | None = None
        self._pending: list[StepOutput] = []
        self._changed = asyncio.Event()

    @property
    def num_unfinished(self) -> int:
        return sum(self.unfinished.values())

    def put(self, output: StepOutput) -> None:
        if not self._pending:
            self._changed.set()
        self._pending.append(output)

    def fail(self, error: PacelineError) -> None:
        """Ends the stream with `error`, after the outputs that came before it. Only the first error counts."""
        self.error = self.error or error
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[list[StepOutput]]:
        """Yields all outputs since the previous batch."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            batch, self._pending = self._pending, []
            if batch:
                yield batch
            if self.error is not None and not self._pending:
                raise self.error
            if not self.unfinished and not self._pending:
                return


SCHEMA_THREADS = 32
"""Threads that wait for the check of a JSON schema."""
ENCODE_THREADS = 2
"""Threads that encode. An owner uses all but one."""
OVERLOADED_SECONDS = 5
"""When a client may try again while all workers are overloaded."""
UNKNOWN_KV = 1 << 40
"""KV tokens of a target that has not reported its cache: the choices alone count."""


class Gateway:
    """Admits the requests of sessions to the target and delivers their outputs."""

    def __init__(
        self,
        target: TargetClient,
        config: ServerConfig,
        metrics: Metrics,
        flags: FlagStore,
        strict: StrictMode | None = None,
        reserved: Callable[[], Mapping[str, float]] = dict,
        limits: RateLimits | None = None,
        cpu: CpuBudgets | None = None,
    ) -> None:
        """`strict` is the strict mode of this server. None if it has no audit log. `reserved` returns the shares that keys have
        reserved. `limits` are the rate limits and `cpu` the budgets that the gateways of all models share. If None, the gateway
        makes its own."""
        self.target, self.config, self.metrics, self.flags, self.strict = target, config, metrics, flags, strict
        self.model, self.tokenizer = config.model_name, target.tokenizer
        self.max_chars = target.max_model_len * target.tokenizer.longest_token
        """Characters of a context window of the longest tokens: a longer prompt cannot fit."""
        self.sampling = config.sampling.params(target.config.model)
        """Sampling parameters of requests that set none."""
        self.limits = limits or RateLimits(metrics.clock, config.gateways)
        self.cpu = cpu or CpuBudgets(config.cpu_seconds_per_minute, metrics.clock)
        """Processor time of each owner."""
        self.categories = Categories(MAX_NAMED_CATEGORIES, MAX_OWNER_CATEGORIES)
        """Traffic categories that clients have named."""
        learning = config.learning
        self.samples = SampleRing(learning.max_samples, learning.max_tokens) if learning.is_collecting else None
        """Samples for `paceline learn`. None if this server collects no samples."""
        self.is_draining = False
        self.encoders = FairThreads(ENCODE_THREADS, max(1, ENCODE_THREADS - 1), "paceline-encoders")
        """Threads that encode long texts and render long conversations."""
        self._schemas = ThreadPoolExecutor(SCHEMA_THREADS, "paceline-schemas")
        self._streams: set[OutputStream] = set()
        self._by_request: dict[str, OutputStream] = {}
        self.queue = AdmissionQueue(reserved)
        metrics.add_queue(lambda: self.queue.num_waiting, lambda: self.queue.waiting_tokens)
        self._retry_after = RetryAfter()
        self._inbox = Inbox(self._read_inbox)
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def num_waiting(self) -> int:
        """Admitted choices beyond the target's batch."""
        return max(0, self.queue.num_admitted - self.target.max_num_seqs)

    @property
    def is_ready(self) -> bool:
        return self.target.is_ready and not self.is_draining

    def charge_cpu(self, owner: Owner, work: str, seconds: float) -> None:
        """Charges processor time to an owner, from any thread."""
        self.cpu.charge(owner, seconds)
        self.metrics.record_cpu(work, seconds)

    async def validate(self, request: Request, owner: Owner) -> ValidatedRequest:
        """The request with its seed. Raises `InvalidRequest`. A JSON schema or a grammar compiles on another thread."""
        if request.sampling.constraint is None:
            return self.target.validate(request)
        check = partial(measured, partial(self.charge_cpu, owner, "schema"), self.target.validate, request)
        return await asyncio.get_running_loop().run_in_executor(self._schemas, check)

    @asynccontextmanager
    async def submit(
        self, requests: Sequence[ValidatedRequest], key: ApiKey, timeout: float | None = None
    ) -> AsyncIterator[OutputStream]:
        """Queues validated requests of a key, or raises if the server is full or draining. Leaving the block cancels the
        unfinished ones within a step."""
        self._loop = asyncio.get_running_loop()
        seconds = self.config.request_timeout if timeout is None else min(timeout, self.config.request_timeout)
        tokens = sum(len(request.prompt_ids) for request in requests)
        self._make_room(sum(request.sampling.n for request in requests), key, tokens)
        stream = OutputStream(requests, [_entry(request, key) for request in requests], self._loop.time() + seconds)
        self._add(stream)
        deadline = self._loop.call_at(stream.deadline, stream.fail, RequestTimeout(seconds))
        try:
            for request in requests:
                self.queue.add(stream.entries[request.id])
            self._start_waiting()
            yield stream
        finally:
            deadline.cancel()
            self._remove(stream)

    @property
    def num_requests(self) -> int:
        """Requests that run or wait in the queue."""
        return len(self._streams)

    async def drain(self) -> bool:
        """Rejects new requests and waits up to `drain_timeout` for running ones, then aborts them. Returns whether all
        finished."""
        self.is_draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), self.config.drain_timeout)
        except TimeoutError:
            self.abort()
            return False
        return True

    def abort(self) -> None:
        """Ends every running request with an error."""
        self.is_draining = True
        for stream in self._streams:
            stream.fail(Unavailable("the server stopped before the request finished"))

    @property
    def highest_cost(self) -> int:
        """Tokens of KV that the most expensive HTTP request needs. 0 without requests."""
        return max(map(_cost, self._streams), default=0)

    def end_most_expensive(self, error: PacelineError) -> str | None:
        """Ends the HTTP request that needs the most tokens of KV. Returns the id of its first engine request."""
        stream = max((stream for stream in self._streams if stream.error is None), key=_cost, default=None)
        if stream is None:
            return None
        stream.fail(error)
        return next(iter(stream.requests))

    def check_capacity(self, num_choices: int, key: ApiKey) -> None:
        """Raises the error that `submit` would raise for this number of choices with short prompts."""
        self._displaced_by(num_choices, key, 0)

    def _make_room(self, num_choices: int, key: ApiKey, tokens: int) -> None:
        """Refuses waiting requests of other keys in favour of this one, or raises."""
        for entry in self._displaced_by(num_choices, key, tokens):
            self.metrics.record_rejection("displaced")
            self._by_request[entry.id].fail(Overloaded(self._retry_after.seconds(self.num_waiting)))
            self.queue.remove(entry)

    def _displaced_by(self, num_choices: int, key: ApiKey, tokens: int) -> Sequence[AdmissionEntry]:
        if not self.target.is_running:
            raise Unavailable("the engine has stopped: see the server's log")
        if self.target.is_overloaded:
            self.metrics.record_rejection("workers_memory")
            raise Overloaded(OVERLOADED_SECONDS, "the memory of all workers is full")
        if self.is_draining:
            self.metrics.record_rejection("draining")
            raise Unavailable("the server is shutting down: send the request to another server")
        capacity = self._capacity()
        most = capacity.max_running + capacity.max_waiting
        if num_choices > most:
            raise BadRequest(
                f"{num_choices} choices exceed the capacity of this server ({most}): request fewer",
                param="n",
                code="invalid_value",
            )
        displaced = self.queue.displaced(
            AdmissionEntry("", key, key.share.priority, num_choices, tokens, tokens), capacity
        )
        if displaced is None:
            self.metrics.record_rejection("overloaded")
            raise Overloaded(self._retry_after.seconds(self.num_waiting))
        return displaced

    def _capacity(self) -> AdmissionLimits:
        max_running, kv_tokens = self.target.max_num_seqs, self.target.kv_tokens or UNKNOWN_KV
        waiting, tokens = self.config.max_waiting, self.config.max_waiting_tokens
        return AdmissionLimits(
            max_running,
            ahead=max(1, max_running // 8),
            kv_tokens=kv_tokens,
            max_waiting=max_running // 4 if waiting is None else waiting,
            max_waiting_tokens=kv_tokens // 2 if tokens is None else tokens,
        )

    def _start_waiting(self) -> None:
        """Starts the requests that are next, as far as the target has room."""
        if not self.queue.num_waiting:
            return
        assert self._loop is not None
        for entry in self.queue.take(self._capacity()):
            stream = self._by_request[entry.id]
            for other in stream.entries.values():
                other.is_displaceable = False
            try:
                self.target.submit(stream.requests[entry.id], self._inbox.listener_of(entry.id, self._loop))
            except PacelineError as error:  # the target was closed
                stream.fail(error)

    def _read_inbox(self) -> None:
        """Pass what the target's thread has delivered to the output streams, and start the requests that are next."""
        assert self._loop is not None
        now = self._loop.time()
        received: list[tuple[ValidatedRequest, StepOutput]] = []
        for request_id, event in self._inbox.take():
            stream = self._by_request.get(request_id)
            if stream is None:  # cancelled since
                continue
            if isinstance(event, PacelineError):
                stream.fail(event)
                continue
            received.append((stream.requests[request_id], event))
            stream.put(event)
        self.metrics.record_outputs(received, now)
        is_any_finished = False
        for request, output in received:
            entry = self._by_request[request.id].entries[request.id]
            self.queue.spend(entry, OUTPUT_COST * len(output.tokens))
            if output.finish_reason is not None:
                self._finish_choice(request, output.finish_reason, now)
                is_any_finished = True
        if is_any_finished:
            self._start_waiting()

    def _finish_choice(self, request: ValidatedRequest, reason: FinishReason, now: float) -> None:
        stream = self._by_request[request.id]
        self.queue.finish_choice(stream.entries[request.id])
        self._retry_after.add_finish(now)
        stream.unfinished[request.id] -= 1
        if stream.unfinished[request.id] == 0:
            del stream.unfinished[request.id], self._by_request[request.id]
            self.metrics.record_finish(request, reason.value, now)

    def _add(self, stream: OutputStream) -> None:
        self._streams.add(stream)
        for request in stream.requests.values():
            self._by_request[request.id] = stream
            self.metrics.record_submit(request)
        self._idle.clear()

    def _remove(self, stream: OutputStream) -> None:
        assert self._loop is not None
        is_cancelled = stream.error is None or isinstance(stream.error, ClientDisconnected)
        for request_id in stream.unfinished:
            del self._by_request[request_id]
            self.queue.remove(stream.entries[request_id])
            self.target.cancel(request_id)
            reason = "cancelled" if is_cancelled else "error"
            self.metrics.record_finish(stream.requests[request_id], reason, self._loop.time())
        stream.unfinished.clear()
        self._start_waiting()
        self._streams.discard(stream)
        if not self._streams:
            self._idle.set()
            self._retry_after.clear()


def _cost(stream: OutputStream) -> int:
    return sum(entry.kv_tokens for entry in stream.entries.values())


def _entry(request: ValidatedRequest, key: ApiKey) -> AdmissionEntry:
    tokens, sampling = len(request.prompt_ids), request.sampling
    num_choices = len(request.unfinished)
    kv_tokens = kv_needed(tokens, sampling.max_tokens, num_choices)
    return AdmissionEntry(request.id, key, request.priority, num_choices, tokens, kv_tokens)

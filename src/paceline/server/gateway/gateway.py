"""The gateway between HTTP and the target: admission, deadlines, cancellation and draining.

All methods run on one event loop. The target's thread only appends to the inbox and wakes the loop once per burst.
"""

import asyncio
import hashlib
import itertools
import math
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple

from paceline.core.errors import PacelineError
from paceline.core.output import OutputEvent, StepOutput
from paceline.core.request import Request, ValidatedRequest
from paceline.core.sequence import FinishReason
from paceline.models.drafts.compatibility import fingerprint
from paceline.runtime.gateway_client.target_client import TargetClient
from paceline.server.auth.rate_limit import RateLimits
from paceline.server.auth.strict import StrictMode
from paceline.server.config.config import ServerConfig
from paceline.server.config.flags import FlagStore
from paceline.server.metrics.metrics import Metrics
from paceline.server.openai.errors import (
    BadRequest,
    ClientDisconnected,
    NotFound,
    Overloaded,
    RequestTimeout,
    Unavailable,
)

MAX_RETRY_AFTER = 60
"""Seconds; largest value of the Retry-After header."""
NUM_FINISH_TIMES = 64
"""Finish times that estimate Retry-After."""


class OutputStream:
    """Step outputs of the admitted requests of one session. The gateway writes, the session reads, on the event loop."""

    def __init__(self, requests: Sequence[ValidatedRequest], deadline: float) -> None:
        self.deadline = deadline
        """Time of the event loop at which the stream fails."""
        self.requests = {request.id: request for request in requests}
        self.unfinished = {request.id: request.sampling.n for request in requests}
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


class Gateway:
    """Admits the requests of sessions to the target and delivers their outputs."""

    def __init__(
        self,
        target: TargetClient,
        config: ServerConfig,
        metrics: Metrics,
        flags: FlagStore,
        strict: StrictMode | None = None,
    ) -> None:
        """`strict`: the strict mode of this server; None if it has no audit log."""
        self.target, self.config, self.metrics, self.flags, self.strict = target, config, metrics, flags, strict
        self.model, self.tokenizer = config.model_name, target.tokenizer
        self.limits = RateLimits(metrics.clock)
        parts = (target.config.model, target.config.dtype, *astuple(fingerprint(target.tokenizer)))
        self.fingerprint = "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
        """Identifier of model, dtype and tokenizer, for `system_fingerprint`."""
        self.is_draining = False
        self._next_number = itertools.count()
        self._streams: set[OutputStream] = set()
        self._by_request: dict[str, OutputStream] = {}
        self._num_admitted = 0  # choices that are admitted and not finished
        self._finish_times: deque[float] = deque(maxlen=NUM_FINISH_TIMES)
        self._inbox: deque[tuple[str, OutputEvent]] = deque()
        self._is_awake = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def num_waiting(self) -> int:
        """Admitted choices beyond the target's batch."""
        return max(0, self._num_admitted - self.target.max_num_seqs)

    @property
    def is_ready(self) -> bool:
        return self.target.is_ready and not self.is_draining

    def next_request_id(self) -> str:
        return f"http-{next(self._next_number)}"

    def check_model(self, name: str | None) -> None:
        """Raises `NotFound` unless `name` is the served model or None."""
        if name is not None and name != self.model:
            raise NotFound(
                f"this server does not serve the model {name!r}: use {self.model!r}",
                param="model",
                code="model_not_found",
            )

    async def validate(self, request: Request) -> ValidatedRequest:
        """The request with its seed. Raises `InvalidRequest`. A JSON schema compiles to a grammar, on another thread."""
        if request.sampling.json_schema is not None:
            return await asyncio.to_thread(self.target.validate, request)
        return self.target.validate(request)

    @asynccontextmanager
    async def submit(
        self, requests: Sequence[ValidatedRequest], timeout: float | None = None
    ) -> AsyncIterator[OutputStream]:
        """Submits validated requests together, or raises if the server is full or draining. Leaving the block cancels the
        unfinished ones within a step."""
        self._loop = asyncio.get_running_loop()
        seconds = self.config.request_timeout if timeout is None else min(timeout, self.config.request_timeout)
        self.check_capacity(sum(request.sampling.n for request in requests))
        stream = OutputStream(requests, self._loop.time() + seconds)
        self._add(stream)
        deadline = self._loop.call_at(stream.deadline, stream.fail, RequestTimeout(seconds))
        try:
            for request in requests:
                self._start(stream, request)
            yield stream
        finally:
            deadline.cancel()
            self._remove(stream)

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

    def check_capacity(self, num_choices: int) -> None:
        """Raises the error that `submit` would raise for this number of choices."""
        if not self.target.is_running:
            raise Unavailable("the engine has stopped: see the server's log")
        if self.is_draining:
            self.metrics.record_rejection("draining")
            raise Unavailable("the server is shutting down: send the request to another server")
        max_running = self.target.max_num_seqs
        max_waiting = max_running // 4 if self.config.max_waiting is None else self.config.max_waiting
        capacity = max_running + max_waiting
        if num_choices > capacity:
            raise BadRequest(
                f"{num_choices} choices exceed the capacity of this server ({capacity}): request fewer",
                param="n",
                code="invalid_value",
            )
        if self._num_admitted + num_choices > capacity:
            self.metrics.record_rejection("overloaded")
            raise Overloaded(self._retry_after())

    def _retry_after(self) -> int:
        """Seconds until the queue is empty, at the recent rate of finished choices."""
        if len(self._finish_times) < 2:
            return 1
        seconds = (self._finish_times[-1] - self._finish_times[0]) / (len(self._finish_times) - 1)
        return max(1, min(MAX_RETRY_AFTER, math.ceil(seconds * self.num_waiting)))

    def _start(self, stream: OutputStream, request: ValidatedRequest) -> None:
        request_id = request.id

        def receive(event: OutputEvent) -> None:  # runs on the target's thread
            self._inbox.append((request_id, event))
            if not self._is_awake:
                self._is_awake = True
                assert self._loop is not None
                self._loop.call_soon_threadsafe(self._read_inbox)

        self.target.submit(request, receive)
        self._by_request[request.id] = stream
        self.metrics.record_submit(request)

    def _read_inbox(self) -> None:
        self._is_awake = False  # before reading: an event that arrives from here on wakes the loop again
        assert self._loop is not None
        now = self._loop.time()
        received: list[tuple[ValidatedRequest, StepOutput]] = []
        while self._inbox:
            request_id, event = self._inbox.popleft()
            stream = self._by_request.get(request_id)
            if stream is None:  # cancelled since
                continue
            if isinstance(event, PacelineError):
                stream.fail(event)
                continue
            received.append((stream.requests[request_id], event))
            stream.put(event)
        self.metrics.record_outputs(received, now)
        for request, output in received:
            if output.finish_reason is not None:
                self._finish_choice(request, output.finish_reason, now)

    def _finish_choice(self, request: ValidatedRequest, reason: FinishReason, now: float) -> None:
        stream = self._by_request[request.id]
        self._num_admitted -= 1
        self._finish_times.append(now)
        stream.unfinished[request.id] -= 1
        if stream.unfinished[request.id] == 0:
            del stream.unfinished[request.id], self._by_request[request.id]
            self.metrics.record_finish(request, reason.value, now)

    def _add(self, stream: OutputStream) -> None:
        self._streams.add(stream)
        self._num_admitted += stream.num_unfinished
        self._idle.clear()

    def _remove(self, stream: OutputStream) -> None:
        assert self._loop is not None
        is_cancelled = stream.error is None or isinstance(stream.error, ClientDisconnected)
        for request_id in stream.unfinished:
            if self._by_request.pop(request_id, None) is not None:  # None: it was not submitted
                self.target.cancel(request_id)
                reason = "cancelled" if is_cancelled else "error"
                self.metrics.record_finish(stream.requests[request_id], reason, self._loop.time())
        self._num_admitted -= stream.num_unfinished
        stream.unfinished.clear()
        self._streams.discard(stream)
        if not self._streams:
            self._idle.set()
            self._finish_times.clear()  # an idle period says nothing about the rate of the next burst

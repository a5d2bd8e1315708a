"""One call of one caller: what it takes of their key's allowance, and what trail and log say of it."""

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager

from paceline.core.output import StepOutput
from paceline.core.request import Request
from paceline.server.auth.api_keys import ApiKey
from paceline.server.auth.rate_limit import Account, RateLimits
from paceline.server.auth.strict import StrictMode, StrictRecord
from paceline.server.metrics.metrics import Metrics
from paceline.server.openai.errors import RateLimited
from paceline.server.request_log import LogEntry, RequestLog


class Visit:
    def __init__(
        self, key: ApiKey, limits: RateLimits, metrics: Metrics, strict: StrictMode | None, log: RequestLog
    ) -> None:
        """`strict`: the mode it is in; None: it is not."""
        self.key, self._limits, self._metrics, self._strict, self._log = key, limits, metrics, strict, log
        self._entry: LogEntry | None = None
        self._account: Account | None = None
        self._record: StrictRecord | None = None

    @property
    def is_strict(self) -> bool:
        return self._strict is not None

    def check(self, requests: int, choices: int) -> None:
        """Raise what `paid` would for so many, before any work was put into them."""
        with self._counted():
            self._limits.check(self.key, requests, choices)

    def once(self) -> None:
        """Pay for a call that generates nothing, or raise."""
        with self._counted(), self._limits.enter(self.key, 1, 0, 0):
            pass

    @contextmanager
    def paid(self, requests: Sequence[Request]) -> Iterator[None]:
        """Takes what they need of the allowance, or raises. Inside the block they are running."""
        choices = sum(request.sampling.n for request in requests)
        tokens = sum(len(request.prompt_ids) for request in requests)
        with ExitStack() as stack:
            with self._counted():
                self._account = stack.enter_context(self._limits.enter(self.key, len(requests), choices, tokens))
            yield

    @contextmanager
    def logged(self, answer_id: str, requests: Sequence[Request]) -> Iterator[None]:
        """After the block the log has a line about it."""
        with self._log.entry(answer_id, self.key.name, requests) as self._entry:
            yield

    def failed(self, error: Exception) -> None:
        """It went wrong, and whoever called was told already."""
        if self._entry is not None:
            self._entry.error = error

    @asynccontextmanager
    async def recorded(self, answer_id: str, requests: Sequence[Request]) -> AsyncIterator[None]:
        """In strict mode the trail has a beginning before the block and an end after it."""
        if self._strict is None:
            yield
            return
        async with self._strict.record(answer_id, self.key.name, requests) as self._record:
            yield

    def saw(self, outputs: Sequence[StepOutput]) -> None:
        assert self._account is not None
        self._limits.spend(self._account, sum(len(output.tokens) for output in outputs))
        if self._record is not None:
            self._record.add(outputs)
        if self._entry is not None:
            self._entry.add(outputs, time.monotonic())

    async def finish(self) -> None:
        """Before the last byte is sent: what a caller has whole, the trail has whole."""
        if self._record is not None:
            await self._record.finish()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except RateLimited:
            self._metrics.rejected("rate_limited")
            raise

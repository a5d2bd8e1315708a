"""The session of one HTTP request, from authentication to the last byte of its response."""

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Self

from starlette.requests import Request as HttpRequest

from paceline.core.errors import InvalidRequest, PacelineError
from paceline.core.output import StepOutput
from paceline.core.request import Request, ValidatedRequest
from paceline.engine.text import RequestText
from paceline.server.auth.api_keys import ApiKey, request_key
from paceline.server.auth.rate_limit import Account, BodyCharge
from paceline.server.auth.strict import AuditEntry
from paceline.server.gateway.gateway import Gateway
from paceline.server.gateway.output_stream import OutputStream
from paceline.server.gateway.request_log import RequestLog
from paceline.server.learning.sample_ring import SampleCollector, make_collector
from paceline.server.openai.errors import BadRequest, RateLimited
from paceline.server.openai.schemas.body import GenerationBody


class RequestSession:
    """Holds the key's allowance, admission, the output stream, the audit entry and the log line of one HTTP request.

    A generation calls `check_limits`, `validate`, then `run`. Inside `run` it reads `outputs`. Leaving `run` closes all parts.
    """

    def __init__(self, gateway: Gateway, key: ApiKey, is_strict: bool, charge: BodyCharge | None = None) -> None:
        """`charge` is what the body took from the key's allowance before it was read."""
        self.gateway, self.key, self.is_strict, self._charge = gateway, key, is_strict, charge
        self._requests: Sequence[ValidatedRequest] = ()
        self._texts: dict[str, RequestText] = {}
        self._timeout: float | None = None
        self._stream: OutputStream | None = None
        self._account: Account | None = None
        self._audit: AuditEntry | None = None
        self._log: RequestLog | None = None
        self._collector: SampleCollector | None = None

    @classmethod
    def open(cls, gateway: Gateway, http: HttpRequest, body: GenerationBody | None = None) -> Self:
        """The session of an authenticated request. It is strict if the key is strict or the body requests it."""
        key = request_key(http)
        is_strict = key.strict or (body is not None and body.speculation is not None and body.speculation.strict)
        if is_strict and gateway.strict is None:
            raise BadRequest(
                "strict mode needs an audit log and this server has none: set `audit_trail`",
                param="speculation.strict",
                code="strict_unavailable",
            )
        return cls(gateway, key, is_strict, getattr(http.state, "charge", None))

    def check_limits(self, num_requests: int, num_choices: int) -> None:
        """Raises the error that `run` would raise for lack of allowance or capacity, before the prompt is encoded."""
        limits = self.gateway.limits
        with self._counted(), limits.without(self._charge):
            limits.check(self.key, num_requests, num_choices)
        self.gateway.check_capacity(num_choices, self.key)

    def charge_call(self) -> None:
        """Takes one request from the key's allowance, for a call that generates nothing."""
        self._return_charge()
        with self._counted(), self.gateway.limits.take(self.key, 1, 0, 0):
            pass

    def _return_charge(self) -> None:
        charge, self._charge = self._charge, None
        if charge is not None:
            self.gateway.limits.give_back(charge)

    async def validate(
        self, requests: Sequence[Request], timeout: float | None = None, schema_field: str = "response_format"
    ) -> Sequence[ValidatedRequest]:
        """Validates the requests of this session, once. `schema_field` is the body's field that holds the JSON schema."""
        try:
            self._requests = [await self.gateway.validate(request) for request in requests]
        except InvalidRequest as error:
            if error.field != "response_format":
                raise
            raise InvalidRequest(str(error), schema_field) from None
        self._texts = {request.id: RequestText(self.gateway.tokenizer, request) for request in self._requests}
        self._timeout = timeout
        return self._requests

    @property
    def requests(self) -> Sequence[ValidatedRequest]:
        return self._requests

    def replace_request(self, request: ValidatedRequest) -> None:
        """Set the only request, before `run`."""
        self._requests = [request]

    def add_text(self, output: StepOutput) -> None:
        """Add the text of an output that the client has, so that later text continues it."""
        self._texts[output.request_id].add(output)

    @asynccontextmanager
    async def run(self, answer_id: str) -> AsyncIterator[None]:
        """Admits the validated requests, or raises. Inside the block they run. Afterwards unfinished requests are cancelled,
        the audit entry is complete and the log line is written."""
        self._collector = make_collector(self.gateway.samples, self.key, self.is_strict, self._requests)
        with self._logged(answer_id), self._charged():
            async with (
                self.gateway.submit(self._requests, self.key, self._timeout) as self._stream,
                self._audited(answer_id),
            ):
                yield

    async def outputs(self) -> AsyncIterator[list[StepOutput]]:
        """Yields batches of step outputs with their text, after it charged, audited and logged them."""
        assert self._stream is not None
        assert self._account is not None
        async for outputs in self._stream:
            for output in outputs:
                self._texts[output.request_id].add(output)
            self.gateway.limits.spend(self._account, sum(len(output.tokens) for output in outputs))
            if self._audit is not None:
                self._audit.add(outputs)
            if self._log is not None:
                self._log.add(outputs, time.monotonic())
            if self._collector is not None:
                self._collector.add(outputs)
            yield outputs

    @property
    def deadline(self) -> float:
        """Time of the event loop at which the requests fail, inside `run`."""
        assert self._stream is not None
        return self._stream.deadline

    def fail(self, error: PacelineError) -> None:
        """Ends the output stream with `error`."""
        assert self._stream is not None
        self._stream.fail(error)

    def record_error(self, error: Exception) -> None:
        """Sets the reason in the log line, for an error that the client has received."""
        if self._log is not None:
            self._log.error = error

    async def finish_audit(self) -> None:
        """Completes the audit entry. Call this before the last byte of a stream: a delivered answer must be in the log."""
        if self._audit is not None:
            await self._audit.finish()

    @contextmanager
    def _logged(self, answer_id: str) -> Iterator[None]:
        config = self.gateway.config
        if config.log_requests == "none":
            yield
            return
        self._log = RequestLog(answer_id, self.key.name, self._requests, with_text=config.log_requests == "text")
        try:
            yield
        except BaseException as error:
            self._log.error = error
            raise
        finally:
            self._log.write(self.gateway.tokenizer)

    @contextmanager
    def _charged(self) -> Iterator[None]:
        choices = sum(request.sampling.n for request in self._requests)
        tokens = sum(len(request.prompt_ids) for request in self._requests)
        self._return_charge()
        with ExitStack() as stack:
            with self._counted():
                take = self.gateway.limits.take(self.key, len(self._requests), choices, tokens)
                self._account = stack.enter_context(take)
            yield

    @asynccontextmanager
    async def _audited(self, answer_id: str) -> AsyncIterator[None]:
        strict, config = self.gateway.strict, self.gateway.config
        if not self.is_strict or strict is None:
            yield
            return
        decode = self.gateway.tokenizer.decode if config.audit_trail_text else None
        async with strict.record(answer_id, self.key.name, self._requests, decode) as self._audit:
            yield

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except RateLimited:
            self.gateway.metrics.record_rejection("rate_limited")
            raise

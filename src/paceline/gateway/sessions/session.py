"""The session of one HTTP request, from authentication to the last byte of its response.

`RequestLog` writes one log line per generation when it ends: key, tokens, times and the reason for the end. The line has no
prompt and no answer unless `log_requests` is `text`.
"""

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any, Self

from starlette.requests import Request as HttpRequest

from paceline.core.errors import InvalidRequest, PacelineError, PromptTooLong
from paceline.core.output import StepOutput
from paceline.core.request import Request, ValidatedRequest
from paceline.gateway.api.bodies import GenerationBody
from paceline.gateway.api.errors import BadRequest, RateLimited, to_api_error
from paceline.gateway.audit import AuditEntry
from paceline.gateway.auth import Account, ApiKey, BodyCharge, request_key
from paceline.gateway.bodies import Owner, owner_of
from paceline.gateway.sessions.gateway import Gateway, OutputStream
from paceline.gateway.sessions.samples import SampleCollector, make_collector
from paceline.model_files.tokenizer import Tokenizer
from paceline.requests import RequestText

logger = logging.getLogger(__name__)


class RequestLog:
    """Counts the outputs of one HTTP request and writes its log line."""

    def __init__(self, answer_id: str, key_name: str, requests: Sequence[Request], with_text: bool) -> None:
        self.error: BaseException | None = None
        """Error that ended the request."""
        self._id, self._key_name, self._requests = answer_id, key_name, requests
        self._started = time.monotonic()
        self._first_token: float | None = None
        self._tokens = self._drafted = self._accepted = 0
        self._finish_reasons: set[str] = set()
        self._text: dict[tuple[str, int], list[str]] | None = {} if with_text else None

    def add(self, outputs: Sequence[StepOutput], now: float) -> None:
        self._first_token = now if self._first_token is None else self._first_token
        for output in outputs:
            self._tokens += len(output.tokens)
            self._drafted += output.drafted
            self._accepted += output.accepted
            if output.finish_reason is not None:
                self._finish_reasons.add(output.finish_reason.value)
            if self._text is not None:
                self._text.setdefault((output.request_id, output.choice), []).append(output.text)

    def write(self, tokenizer: Tokenizer) -> None:
        fields: dict[str, Any] = {
            "request_id": self._id,
            "who": self._key_name,
            "category": self._requests[0].category,
            "prompt_tokens": sum(len(request.prompt_ids) for request in self._requests),
            "output_tokens": self._tokens,
            "drafted": self._drafted,
            "accepted": self._accepted,
            "seconds": round(time.monotonic() - self._started, 4),
            "reason": self._reason(),
        }
        if self._first_token is not None:
            fields["first_token_seconds"] = round(self._first_token - self._started, 4)
        if self._requests[0].trace:
            fields["trace_id"] = self._requests[0].trace.split("-")[1]
        if self._text is not None:
            # Special tokens separate the messages of a conversation
            fields["prompt"] = [tokenizer.decode(request.prompt_ids, skip_special=False) for request in self._requests]
            fields["answer"] = ["".join(text) for text in self._text.values()]
        logger.info("generated", extra=fields)

    def _reason(self) -> str:
        """The finish reasons of all choices, or the code of the error."""
        if self.error is None:
            return ", ".join(sorted(self._finish_reasons)) or "cancelled"
        if not isinstance(self.error, Exception):
            return "cancelled"
        error = to_api_error(self.error)
        return error.code or error.type


class RequestSession:
    """Holds the key's allowance, admission, the output stream, the audit entry and the log line of one HTTP request.

    A generation calls `check_limits`, `validate`, then `run`. Inside `run` it reads `outputs`. Leaving `run` closes all parts.
    """

    def __init__(
        self, gateway: Gateway, key: ApiKey, owner: Owner, is_strict: bool, charge: BodyCharge | None = None
    ) -> None:
        """`owner` pays for the processor time of the request. `charge` is what the body took from the key's allowance before it
        was read."""
        self.gateway, self.key, self.is_strict, self._charge = gateway, key, is_strict, charge
        self._owner = owner
        self._requests: Sequence[ValidatedRequest] = ()
        self._texts: dict[str, RequestText] = {}
        self._split: Callable[[list[StepOutput]], list[StepOutput]] | None = None
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
        return cls(gateway, key, owner_of(http.scope), is_strict, getattr(http.state, "charge", None))

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
        self,
        requests: Sequence[Request],
        timeout: float | None = None,
        schema_field: str = "response_format",
        prompt_field: str = "prompt",
    ) -> Sequence[ValidatedRequest]:
        """Validates the requests of this session, once. `schema_field` is the body's field that holds the JSON schema, and
        `prompt_field` that of a prompt that is too long."""
        try:
            self._requests = [await self.gateway.validate(request, self._owner) for request in requests]
        except PromptTooLong as error:
            error.field = prompt_field
            raise
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

    def split_outputs(self, split: Callable[[list[StepOutput]], list[StepOutput]]) -> None:
        """Let `split` divide outputs before their text is made."""
        self._split = split

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
        async for batch in self._stream:
            outputs = batch if self._split is None else self._split(batch)
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

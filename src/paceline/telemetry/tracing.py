"""OpenTelemetry traces over OTLP.

The gateway decides whether a request is traced: by the client's `traceparent`, or without one by the sampling `ratio`. Workers
trace exactly the requests that carry a context. Spans hold numbers and names, never text. The spans of a request:

generate
  queue            until the first scheduled step
  prompt           until the first token
  round            one draft-and-verify round of one choice, or a plain step
    draft            time of drafting, for the whole batch of the step
    verify           time of the target's pass, for the whole batch

`CollectorExporter` sends spans to an OTLP collector. A collector that fails is logged once, not at every attempt.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from paceline.core.clock import Clock, WallClock
from paceline.core.cluster_config import trace_url
from paceline.core.errors import MissingDependency, PacelineError
from paceline.core.output import StepOutput
from paceline.core.request import Request
from paceline.core.version import VERSION

try:
    from opentelemetry.exporter.otlp.proto.http import trace_exporter
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
except ImportError:
    raise MissingDependency("opentelemetry-exporter-otlp-proto-http", "tracing", "trace") from None

logger = logging.getLogger(__name__)


class _FirstFailure(logging.Filter):
    """Passes the first record, and then none until `end`."""

    def __init__(self) -> None:
        super().__init__()
        self._has_passed = False

    def filter(self, record: logging.LogRecord) -> bool:
        is_first, self._has_passed = not self._has_passed, True
        return is_first

    def end(self) -> bool:
        """Whether a record has passed since the last call."""
        had_passed, self._has_passed = self._has_passed, False
        return had_passed


class CollectorExporter(trace_exporter.OTLPSpanExporter):
    """Logs the first failure with its reason, and when the collector takes spans again. Spans between are dropped."""

    def __init__(self, url: str, timeout: float) -> None:
        super().__init__(endpoint=url, timeout=timeout)
        self._url, self._failure = url, _FirstFailure()
        self._log = logging.getLogger(trace_exporter.__name__)
        self._log.addFilter(self._failure)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if result is SpanExportResult.SUCCESS and self._failure.end():
            logger.info("the trace collector at %s takes spans again", self._url)
        return result

    def shutdown(self) -> None:
        super().shutdown()  # type: ignore[no-untyped-call]
        self._log.removeFilter(self._failure)


try:
    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    raise MissingDependency("opentelemetry-exporter-otlp-proto-http", "tracing", "trace") from None

TIMEOUT = 5.0
"""Timeout in seconds of sending a batch of spans, and of `close`."""
QUEUE = 16384
"""Capacity of the span queue; when it is full, spans are dropped."""
DELAY = 1000
"""Milliseconds between two batches."""


class RequestTrace:
    """Call `add` for every output, then `end` once, on one thread."""

    def __init__(self, tracer: Tracer, context: Context, request: Request, clock: Clock) -> None:
        self._tracer, self._clock = tracer, clock
        self._submitted = clock.now()
        # Spans have wall-clock times; steps have times of the engine's clock
        self._offset = time.time_ns() - int(1e9 * self._submitted)
        attributes: dict[str, str | int] = {
            "paceline.request_id": request.id,
            "paceline.category": request.category,
            "paceline.prompt_tokens": len(request.prompt_ids),
            "paceline.choices": len(request.unfinished),
            "paceline.continued": bool(request.committed),
        }
        self._span = tracer.start_span("generate", context, attributes=attributes, start_time=self._at(self._submitted))
        self._context = set_span_in_context(self._span)
        self._started: set[int] = set()
        self._tokens = self._drafted = self._accepted = 0

    def add(self, output: StepOutput) -> None:
        now, times = self._clock.now(), output.times
        self._tokens += len(output.tokens)
        if output.choice not in self._started:
            self._started.add(output.choice)
            scheduled = self._submitted + output.waited
            self._child("queue", self._submitted, scheduled, {"paceline.choice": output.choice})
            attributes = {"paceline.choice": output.choice, "paceline.cached_tokens": output.num_cached}
            self._child("prompt", scheduled, now, attributes)
        elif times is not None:
            self._drafted += output.drafted
            self._accepted += output.accepted
            self._round(output, times.began, times.drafted, times.verified, now)
        if output.finish_reason is not None:
            reason = output.finish_reason.value
            self._span.add_event(
                "finished",
                {"paceline.choice": output.choice, "paceline.finish_reason": reason},
                self._at(now),
            )

    def end(self, error: PacelineError | None = None) -> None:
        self._span.set_attributes(
            {
                "paceline.output_tokens": self._tokens,
                "paceline.drafted": self._drafted,
                "paceline.accepted": self._accepted,
            }
        )
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        self._span.end(self._at(self._clock.now()))

    def _round(self, output: StepOutput, began: float, drafted: float, verified: float, now: float) -> None:
        attributes: dict[str, str | int] = {
            "paceline.choice": output.choice,
            "paceline.method": output.method if output.drafted else "plain",
            "paceline.depth": output.drafted,
            "paceline.accepted": output.accepted,
            "paceline.tokens": len(output.tokens),
        }
        span = self._tracer.start_span("round", self._context, attributes=attributes, start_time=self._at(began))
        inside = set_span_in_context(span)
        if output.drafted:
            self._tracer.start_span("draft", inside, start_time=self._at(began)).end(self._at(drafted))
        self._tracer.start_span("verify", inside, start_time=self._at(drafted)).end(self._at(verified))
        span.end(self._at(now))

    def _child(self, name: str, start: float, end: float, attributes: dict[str, int]) -> None:
        span = self._tracer.start_span(name, self._context, attributes=attributes, start_time=self._at(start))
        span.end(self._at(end))

    def _at(self, seconds: float) -> int:
        return self._offset + int(1e9 * seconds)


class Tracing:
    """Creates spans and sends them from a background thread. `close` sends the last spans."""

    def __init__(self, exporter: SpanExporter, service: str, ratio: float = 0.0, clock: Clock | None = None) -> None:
        """`ratio` is the traced share of the requests without a context."""
        attributes = {
            "service.name": "paceline",
            "service.instance.id": service,
            "service.version": VERSION,
        }
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)), resource=Resource.create(attributes), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=QUEUE, schedule_delay_millis=DELAY)
        )
        self._tracer = self._provider.get_tracer("paceline")
        self._contexts = TraceContextTextMapPropagator()
        self._clock = clock or WallClock()

    @staticmethod
    def to(endpoint: str, service: str, ratio: float = 0.0) -> "Tracing":
        """Send spans to the OTLP collector at `endpoint`."""
        return Tracing(CollectorExporter(trace_url(endpoint), TIMEOUT), service, ratio)

    def start_server_span(self, name: str, headers: Mapping[str, str], attributes: Mapping[str, Any]) -> Span:
        """Start the span of an HTTP request, in the trace of its headers if they name one. `is_recording()` is whether it is
        traced. The caller ends it."""
        return self._tracer.start_span(
            name, self._contexts.extract(headers), SpanKind.SERVER, attributes, record_exception=False
        )

    def context(self, span: Span) -> str:
        """The span's context, for `Request.trace`."""
        carrier: dict[str, str] = {}
        self._contexts.inject(carrier, set_span_in_context(span))
        return carrier.get("traceparent", "")

    def follow(self, request: Request) -> RequestTrace:
        """The trace of a request that has just been submitted."""
        return RequestTrace(self._tracer, self._contexts.extract({"traceparent": request.trace}), request, self._clock)

    def close(self) -> None:
        """Send the remaining spans, for at most `TIMEOUT` seconds. May be called twice."""
        sender = threading.Thread(target=self._provider.shutdown, name="paceline-last-spans", daemon=True)
        sender.start()
        sender.join(TIMEOUT)

    def __enter__(self) -> "Tracing":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

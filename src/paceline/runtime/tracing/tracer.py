"""OpenTelemetry traces over OTLP: where spans go, and which requests have any.

A gateway decides with the HTTP request whether it is traced: if the caller's `traceparent` says so, or there is none and the
request is one of the `ratio`. Everybody behind it follows what comes with a context and nothing else. Spans have numbers and
names in them, never a word of a prompt or an answer.
"""

import threading
from collections.abc import Mapping
from importlib.metadata import version
from types import TracebackType
from typing import Any

from paceline.core.clock import Clock, WallClock
from paceline.core.cluster_config import trace_url
from paceline.core.errors import MissingDependency
from paceline.core.request import Request

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    from opentelemetry.trace import Span, SpanKind, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    raise MissingDependency("opentelemetry-exporter-otlp-proto-http", "tracing", "trace") from None

from paceline.runtime.tracing.request_trace import RequestTrace

TIMEOUT = 5.0
"""Seconds that a batch of spans, and all of them at the end, may take to be sent."""
QUEUE = 16384
"""Spans that wait to be sent; when they are more, the oldest are dropped."""
DELAY = 1000
"""Milliseconds that spans wait for others to be sent with."""


class Tracing:
    """Makes spans, and sends them from a thread of its own. `close` sends the last ones."""

    def __init__(self, exporter: SpanExporter, service: str, ratio: float = 0.0, clock: Clock | None = None) -> None:
        """`ratio`: of the requests that come without a context, the share that is traced."""
        about = {"service.name": "paceline", "service.instance.id": service, "service.version": version("paceline")}
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)), resource=Resource.create(about), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=QUEUE, schedule_delay_millis=DELAY)
        )
        self._tracer = self._provider.get_tracer("paceline")
        self._contexts = TraceContextTextMapPropagator()
        self._clock = clock or WallClock()

    @staticmethod
    def to(endpoint: str, service: str, ratio: float = 0.0) -> "Tracing":
        """Spans go to the OTLP collector at `endpoint`."""
        return Tracing(OTLPSpanExporter(endpoint=trace_url(endpoint), timeout=TIMEOUT), service, ratio)

    def serve(self, name: str, headers: Mapping[str, str], attributes: Mapping[str, Any]) -> Span:
        """The span of a request from outside, in the trace that its headers name, if they do. End it. Whether it is traced
        is its `is_recording()`."""
        return self._tracer.start_span(
            name, self._contexts.extract(headers), SpanKind.SERVER, attributes, record_exception=False
        )

    def context(self, span: Span) -> str:
        """For `Request.trace`."""
        carrier: dict[str, str] = {}
        self._contexts.inject(carrier, set_span_in_context(span))
        return carrier.get("traceparent", "")

    def follow(self, request: Request) -> RequestTrace:
        return RequestTrace(self._tracer, self._contexts.extract({"traceparent": request.trace}), request, self._clock)

    def close(self) -> None:
        """Safe to call twice. Takes as long as the collector does, `TIMEOUT` at the most."""
        sender = threading.Thread(target=self._provider.shutdown, name="paceline-last-spans", daemon=True)
        sender.start()
        sender.join(TIMEOUT)

    def __enter__(self) -> "Tracing":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""OpenTelemetry traces over OTLP.

The gateway decides whether a request is traced: by the client's `traceparent`, or without one by the sampling `ratio`. Workers
trace exactly the requests that carry a context. Spans hold numbers and names, never text of prompts or outputs.
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
"""Timeout in seconds of sending a batch of spans, and of `close`."""
QUEUE = 16384
"""Capacity of the span queue; when it is full, spans are dropped."""
DELAY = 1000
"""Milliseconds between two batches."""


class Tracing:
    """Creates spans and sends them from a background thread. `close` sends the last ones."""

    def __init__(self, exporter: SpanExporter, service: str, ratio: float = 0.0, clock: Clock | None = None) -> None:
        """`ratio`: traced share of the requests without a context."""
        attributes = {
            "service.name": "paceline",
            "service.instance.id": service,
            "service.version": version("paceline"),
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
        return Tracing(OTLPSpanExporter(endpoint=trace_url(endpoint), timeout=TIMEOUT), service, ratio)

    def start_server_span(self, name: str, headers: Mapping[str, str], attributes: Mapping[str, Any]) -> Span:
        """Start the span of an HTTP request, in the trace of its headers if they name one. `is_recording()` says whether it is
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

"""Sends spans to an OTLP collector. A collector that fails is logged once, not at every attempt."""

import logging
from collections.abc import Sequence

from paceline.core.errors import MissingDependency

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

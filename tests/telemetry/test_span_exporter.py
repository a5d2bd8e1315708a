"""A collector that fails is logged once."""

import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult

from paceline.telemetry.tracing import CollectorExporter

STATUSES: list[int] = []


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(STATUSES.pop(0))
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def exporter() -> Iterator[CollectorExporter]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    exporter = CollectorExporter(f"http://127.0.0.1:{server.server_port}/v1/traces", 5.0)
    try:
        yield exporter
    finally:
        exporter.shutdown()
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_failure_and_its_end_are_logged_once(exporter: CollectorExporter, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    STATUSES[:] = [200, 404, 404, 200, 200, 404]
    results = [exporter.export([]) is SpanExportResult.SUCCESS for _ in range(6)]
    assert results == [True, False, False, True, True, False]
    messages = [record.getMessage() for record in caplog.records if "urllib3" not in record.name]
    assert len(messages) == 3
    assert "404" in messages[0]
    assert messages[1].endswith("takes spans again")
    assert "404" in messages[2]


def test_a_closed_exporter_leaves_the_log_as_it_was(exporter: CollectorExporter) -> None:
    log = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    assert log.filters
    exporter.shutdown()
    assert log.filters == []

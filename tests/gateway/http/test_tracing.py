"""Spans of HTTP requests, and the trace context that the engine receives."""

import asyncio
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from paceline.core.errors import InvalidConfig
from paceline.gateway.auth.access import Access
from paceline.gateway.config.config import ServerConfig
from paceline.gateway.http.app import create_app
from paceline.gateway.sessions.models import ServedModels
from paceline.telemetry.tracing import Tracing
from tests.gateway.fakes import Served, served

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"prompt": "my secret", "max_tokens": 8}


class TracedServer:
    """A server that keeps its spans in memory."""

    def __init__(self, ratio: float = 1.0, **config: Any) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing(self._exporter, "gateway", ratio)
        self.server: Served = served(**config)
        access = Access.from_config(self.server.gateway.config, lambda: 0.0)
        self.server.app = create_app(ServedModels([self.server.gateway]), access, self.tracing)

    def spans(self) -> list[ReadableSpan]:
        self.tracing.close()
        return list(self._exporter.get_finished_spans())


@pytest.mark.parametrize("body", [BODY, {**BODY, "stream": True}])
def test_a_request_has_a_span_and_the_engine_gets_its_context(body: dict[str, Any]) -> None:
    traced = TracedServer()
    assert traced.server.post("/v1/completions", body).status_code == 200
    (span,) = traced.spans()
    (request,) = traced.server.target.requests
    assert (span.name, span.kind, span.parent) == ("POST /v1/completions", SpanKind.SERVER, None)
    assert dict(span.attributes or {}) == {
        "paceline.request_id": request.id,
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }
    version, trace, parent, flags = request.trace.split("-")
    assert (version, trace, parent) == ("00", f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}")
    assert int(flags, 16) & 1


def test_a_traceparent_header_continues_its_trace() -> None:
    traced = TracedServer(ratio=0.0)
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    traced.server.post("/v1/completions", BODY, headers=headers)
    (span,) = traced.spans()
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, SPAN)
    assert traced.server.target.requests[0].trace.startswith(f"00-{TRACE}-")


@pytest.mark.parametrize("traceparent", [f"00-{TRACE}-{SPAN}-00", None])
def test_requests_that_are_not_sampled_have_no_span(traceparent: str | None) -> None:
    """An unsampled traceparent disables tracing; without the header the ratio decides."""
    traced = TracedServer(ratio=1.0 if traceparent else 0.0)
    headers = {"traceparent": traceparent} if traceparent else {}
    traced.server.post("/v1/completions", BODY, headers=headers)
    assert traced.spans() == []
    assert traced.server.target.requests[0].trace == ""


def test_the_ratio_selects_requests() -> None:
    traced = TracedServer(ratio=0.25)
    for _ in range(200):
        traced.server.post("/v1/completions", BODY)
    assert 20 <= len(traced.spans()) <= 80


def test_get_requests_have_no_spans() -> None:
    traced = TracedServer()
    for path in ("/health", "/metrics", "/v1/models", "/v1/paceline/overview"):
        assert traced.server.call("GET", path).status_code == 200
    assert traced.spans() == []


def test_rejected_requests_have_spans_and_unknown_paths_are_no_names() -> None:
    traced = TracedServer()
    assert traced.server.post("/v1/completions", {"prompt": 1.5}).status_code == 400
    assert traced.server.post("/made/up", {}).status_code == 404
    rejected, unknown = traced.spans()
    assert (rejected.attributes or {})["http.response.status_code"] == 400
    assert unknown.name == "POST"
    assert (unknown.attributes or {})["http.response.status_code"] == 404


def test_a_failed_request_has_an_error_span() -> None:
    traced = TracedServer(hold=True)

    async def run() -> None:
        async with traced.server.client() as client:
            task = asyncio.create_task(client.post("/v1/completions", json=BODY))
            while not traced.server.target.requests:
                await asyncio.sleep(0)
            traced.server.target.fail()
            assert (await task).status_code == 503

    asyncio.run(run())
    (failed,) = traced.spans()
    assert not failed.status.is_ok


def test_spans_hold_no_text() -> None:
    traced = TracedServer(text="an answer of ours")
    traced.server.post("/v1/completions", BODY)
    spans = "".join(span.to_json() for span in traced.spans())
    assert spans
    assert "secret" not in spans
    assert "answer" not in spans


def test_settings_are_checked() -> None:
    with pytest.raises(InvalidConfig, match="trace_ratio must be in"):
        ServerConfig(trace_ratio=1.5)
    with pytest.raises(InvalidConfig, match="trace_endpoint must be a URL"):
        ServerConfig(trace_endpoint="collector:4318")

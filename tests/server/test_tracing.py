"""The span of an HTTP request, in the caller's trace or one of its own, and the context that goes on to the engine."""

import asyncio
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from paceline.core.errors import InvalidConfig
from paceline.runtime.tracing.tracer import Tracing
from paceline.server.app import create_app
from paceline.server.auth.access import Access
from paceline.server.config.config import ServerConfig
from tests.server.fakes import Served, served

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"prompt": "my secret", "max_tokens": 8}


class Watched:
    def __init__(self, ratio: float = 1.0, **config: Any) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing(self._exporter, "gateway", ratio)
        self.server: Served = served(**config)
        access = Access.from_config(self.server.gateway.config, lambda: 0.0)
        self.server.app = create_app(self.server.gateway, access, self.tracing)

    def spans(self) -> list[ReadableSpan]:
        self.tracing.close()
        return list(self._exporter.get_finished_spans())


@pytest.mark.parametrize("body", [BODY, {**BODY, "stream": True}])
def test_a_request_has_a_span_and_the_engine_its_context(body: dict[str, Any]) -> None:
    watched = Watched()
    assert watched.server.post("/v1/completions", body).status_code == 200
    (span,) = watched.spans()
    assert (span.name, span.kind, span.parent) == ("POST /v1/completions", SpanKind.SERVER, None)
    assert dict(span.attributes or {}) == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }
    (request,) = watched.server.target.requests
    version, trace, parent, flags = request.trace.split("-")
    assert (version, trace, parent) == ("00", f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}")
    assert int(flags, 16) & 1


def test_a_callers_trace_goes_on() -> None:
    watched = Watched(ratio=0.0)
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    watched.server.post("/v1/completions", BODY, headers=headers)
    (span,) = watched.spans()
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, SPAN)
    assert watched.server.target.requests[0].trace.startswith(f"00-{TRACE}-")


@pytest.mark.parametrize("traceparent", [f"00-{TRACE}-{SPAN}-00", None])
def test_who_is_not_chosen_is_not_traced(traceparent: str | None) -> None:
    """A caller who says no is not asked again; a caller who says nothing is one of the ratio, or is not."""
    watched = Watched(ratio=1.0 if traceparent else 0.0)
    headers = {"traceparent": traceparent} if traceparent else {}
    watched.server.post("/v1/completions", BODY, headers=headers)
    assert watched.spans() == []
    assert watched.server.target.requests[0].trace == ""


def test_the_ratio_is_kept() -> None:
    watched = Watched(ratio=0.25)
    for _ in range(200):
        watched.server.post("/v1/completions", BODY)
    assert 20 <= len(watched.spans()) <= 80


def test_pages_and_figures_have_no_spans() -> None:
    watched = Watched()
    for path in ("/health", "/metrics", "/v1/models", "/v1/paceline/overview"):
        assert watched.server.call("GET", path).status_code == 200
    assert watched.spans() == []


def test_refusals_and_wrong_addresses_are_seen_without_names_that_callers_make_up() -> None:
    watched = Watched()
    assert watched.server.post("/v1/completions", {"prompt": 1.5}).status_code == 400
    assert watched.server.post("/made/up", {}).status_code == 404
    refused, lost = watched.spans()
    assert (refused.attributes or {})["http.response.status_code"] == 400
    assert lost.name == "POST"
    assert (lost.attributes or {})["http.response.status_code"] == 404


def test_a_failure_is_an_error_and_a_caller_who_leaves_is_not() -> None:
    watched = Watched(hold=True)

    async def run() -> None:
        async with watched.server.client() as client:
            task = asyncio.create_task(client.post("/v1/completions", json=BODY))
            while not watched.server.target.requests:
                await asyncio.sleep(0)
            watched.server.target.fail()
            assert (await task).status_code == 503

    asyncio.run(run())
    (failed,) = watched.spans()
    assert not failed.status.is_ok


def test_no_span_holds_a_word_of_what_was_said() -> None:
    watched = Watched(text="an answer of ours")
    watched.server.post("/v1/completions", BODY)
    said = "".join(span.to_json() for span in watched.spans())
    assert said
    assert "secret" not in said
    assert "answer" not in said


def test_settings_are_checked() -> None:
    with pytest.raises(InvalidConfig, match="trace_ratio must be in"):
        ServerConfig(trace_ratio=1.5)
    with pytest.raises(InvalidConfig, match="trace_endpoint must be a URL"):
        ServerConfig(trace_endpoint="collector:4318")

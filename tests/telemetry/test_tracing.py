"""Spans of a request, in one process and in a target worker."""

import builtins
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from paceline.core.clock import WallClock
from paceline.core.errors import EngineClosed, MissingDependency
from paceline.core.output import OutputEvent, StepOutput
from paceline.core.request import Request
from paceline.engine.loop import EngineLoop
from paceline.telemetry.tracing import Tracing
from paceline.wire.gateway_messages import TO_TARGET_WORKER, Submit
from tests.collector import collector
from tests.engine.harness import GREEDY, PROMPT, engine_of, oracle, plain_tokens, request
from tests.processes.target_harness import Gate, StreamReader, WorkerThread, pool_of

TOKENS = 20
TEXT = plain_tokens(max_tokens=TOKENS, **GREEDY)
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


def traced_request(name: str = "r", trace: str = PARENT, **sampling: Any) -> Request:
    return replace(request(name, PROMPT, max_tokens=TOKENS, **GREEDY, **sampling), trace=trace, category="code")


class TracedEngine:
    """An engine with a perfect draft on its thread, and its spans."""

    def __init__(self, steps: int | None = None, tracing: Tracing | None = None) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = tracing or Tracing(self.exporter, "test")
        engine = engine_of(oracle(TEXT), depth=3, clock=WallClock())
        self.gate = None if steps is None else Gate(engine, steps)
        self.loop = EngineLoop(engine, self.tracing)
        self.events: list[OutputEvent] = []

    def run(self, one: Request) -> list[StepOutput]:
        done, left = threading.Event(), one.sampling.n

        def listen(event: OutputEvent) -> None:
            nonlocal left
            self.events.append(event)
            left -= isinstance(event, StepOutput) and event.finish_reason is not None
            if left == 0:
                done.set()

        self.loop.submit(one, listen)
        assert done.wait(30)
        return [event for event in self.events if isinstance(event, StepOutput)]

    def spans(self) -> list[ReadableSpan]:
        self.loop.close()
        self.tracing.close()
        return list(self.exporter.get_finished_spans())


def named(spans: list[ReadableSpan], name: str) -> list[ReadableSpan]:
    return [span for span in spans if span.name == name]


def test_every_round_has_a_span() -> None:
    traced = TracedEngine()
    outputs = traced.run(traced_request())
    spans = traced.spans()
    (generate,) = named(spans, "generate")
    assert {format(span.context.trace_id, "032x") for span in spans} == {TRACE}
    assert generate.parent is not None
    assert format(generate.parent.span_id, "016x") == SPAN
    assert generate.attributes is not None
    assert dict(generate.attributes) == {
        "paceline.request_id": "r",
        "paceline.category": "code",
        "paceline.prompt_tokens": len(PROMPT),
        "paceline.choices": 1,
        "paceline.continued": False,
        "paceline.output_tokens": TOKENS,
        "paceline.drafted": sum(output.drafted for output in outputs),
        "paceline.accepted": sum(output.accepted for output in outputs),
    }
    assert [event.name for event in generate.events] == ["finished"]
    rounds = named(spans, "round")
    assert [
        (
            span.attributes["paceline.method"],
            span.attributes["paceline.depth"],
            span.attributes["paceline.accepted"],
            span.attributes["paceline.tokens"],
        )
        for span in rounds
        if span.attributes
    ] == [
        ("fake" if output.drafted else "plain", output.drafted, output.accepted, len(output.tokens))
        for output in outputs[1:]
    ]
    for name in ("queue", "prompt", "round"):
        assert all(span.parent == generate.context for span in named(spans, name)), name
    assert [span.parent for span in named(spans, "verify")] == [span.context for span in rounds]
    assert len(named(spans, "draft")) == sum(output.drafted > 0 for output in outputs)


def test_spans_lie_within_their_parents() -> None:
    traced = TracedEngine()
    traced.run(traced_request())
    spans = traced.spans()
    by_id = {span.context.span_id: span for span in spans}
    for span in spans:
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time
        parent = by_id.get(span.parent.span_id) if span.parent else None
        if parent is not None and parent.start_time is not None and parent.end_time is not None:
            slack = 1000  # nanoseconds, for the rounding of seconds as floats
            assert parent.start_time - slack <= span.start_time
            assert span.end_time <= parent.end_time + slack


def test_choices_have_their_own_spans() -> None:
    traced = TracedEngine()
    traced.run(traced_request(n=2))
    spans = traced.spans()
    for name in ("queue", "prompt", "round"):
        assert {span.attributes["paceline.choice"] for span in named(spans, name) if span.attributes} == {0, 1}, name
    assert len(named(spans, "generate")) == 1


def test_request_without_context_has_no_spans() -> None:
    traced = TracedEngine()
    traced.run(traced_request(trace=""))
    assert traced.spans() == []


def test_unsampled_or_invalid_context_has_no_spans() -> None:
    for trace in (f"00-{TRACE}-{SPAN}-00", "nonsense"):
        traced = TracedEngine()
        traced.run(traced_request(trace=trace))
        assert traced.spans() == []


def test_cancelled_request_ends_its_span() -> None:
    traced = TracedEngine(steps=3)
    assert traced.gate is not None
    traced.loop.submit(traced_request(), traced.events.append)
    assert traced.gate.reached.wait(30)
    traced.loop.cancel("r")
    traced.gate.open()
    spans = traced.spans()
    (generate,) = named(spans, "generate")
    assert generate.status.is_ok
    assert generate.events == ()


def test_failed_engine_sets_the_error_status() -> None:
    traced = TracedEngine()

    def broken() -> list[StepOutput]:
        raise RuntimeError("no memory")

    traced.loop.engine.advance = broken  # type: ignore[method-assign]
    traced.loop.submit(traced_request(), traced.events.append)
    traced.loop._thread.join(30)
    (generate,) = named(traced.spans(), "generate")
    assert not generate.status.is_ok
    assert isinstance(traced.events[-1], EngineClosed)


def test_context_is_sent_with_the_request() -> None:
    one = traced_request(seed=1)
    message = TO_TARGET_WORKER.decode(TO_TARGET_WORKER.encode(Submit(2, 1, one)))
    assert isinstance(message, Submit)
    assert message.request.trace == PARENT


def test_rounds_of_a_target_worker_reach_the_collector() -> None:
    with collector() as found:
        worker = WorkerThread("target-0", tracing=Tracing.to(found.url, "target-0"))
        with pool_of(worker) as pool:
            outputs = StreamReader(pool, traced_request(seed=1)).read_all()
        spans = found.spans["target-0"]
        assert found.paths[0] == "/v1/traces"
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    (generate,) = [span for span in spans if span.name == "generate"]
    assert generate.parent_span_id.hex() == SPAN
    assert len([span for span in spans if span.name == "round"]) == len(outputs) - 1


def test_absent_collector_does_not_block_requests(caplog: pytest.LogCaptureFixture) -> None:
    with collector() as found:
        url = found.url
    traced = TracedEngine(tracing=Tracing.to(url, "test"))
    assert len(traced.run(traced_request())) > 1
    traced.loop.close()
    traced.tracing.close()
    traced.tracing.close()


def test_missing_package_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.delitem(sys.modules, "paceline.telemetry.tracing")
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingDependency, match=r"pip install 'paceline\[trace\]'"):
        __import__("paceline.telemetry.tracing")

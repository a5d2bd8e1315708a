"""The dashboard's data: one sample per second and the current state."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from paceline.core.output import StepOutput
from paceline.core.request import Request, SpeculationFlags
from paceline.core.sequence import FinishReason, Origin
from paceline.core.status import AuditCounts, BreakerState, ClusterStatus, EngineStatus, TrafficStatus, WorkerStatus
from paceline.gateway.admin import overview as module
from paceline.gateway.admin.overview import MAX_SAMPLES, Overview
from tests.gateway.fakes import Served, served

STATUS = EngineStatus(3, 2, 10, 40, 0, 0, SpeculationFlags(True, "ngram", 6), ())


def traffic(category: str, method: str = "ngram", depth: float = 1.0) -> TrafficStatus:
    return TrafficStatus(method, category, BreakerState.CLOSED, (0.5, 0.25), depth, {})


class Harness:
    """A server with a clock and an engine status that the test sets."""

    def __init__(self, **config: Any) -> None:
        self.now = 1000.0
        self.server: Served = served(clock=lambda: self.now, **config)
        self.overview = Overview(self.server.gateway, clock=lambda: self.now)
        self.set_status(STATUS)

    def set_status(self, status: EngineStatus) -> None:
        self.server.target.engine_status = lambda: status  # type: ignore[method-assign]

    def set_workers(self, *workers: WorkerStatus) -> None:
        self.server.target.cluster_status = lambda: ClusterStatus(workers, 0)  # type: ignore[method-assign]

    def tick(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.overview.sample()

    def generate(self, name: str, category: str, tokens: int, seconds: float) -> None:
        """Records one token now and the others after `seconds`."""
        request, metrics = Request(name, (1,), category=category), self.server.gateway.metrics
        metrics.record_submit(request)
        output = StepOutput(name, 0, 0, (1,), (Origin.PLAIN,), "")
        metrics.record_outputs([(request, output)], self.now)
        rest = replace(
            output, tokens=(1,) * (tokens - 1), origins=(Origin.PLAIN,) * (tokens - 1), finish_reason=FinishReason.STOP
        )
        metrics.record_outputs([(request, rest)], self.now + seconds)

    @property
    def last(self) -> module.Sample:
        return self.overview.report().samples[-1]


def test_tokens_per_second_by_category() -> None:
    harness = Harness()
    harness.tick()
    harness.generate("a", "code", 30, 1.0)
    harness.tick()
    assert harness.last.tokens_per_second == {"code": 30.0}
    harness.generate("b", "prose", 10, 1.0)
    harness.tick()
    assert harness.last.tokens_per_second == {"code": 15.0, "prose": 5.0}
    for _ in range(6):
        harness.tick()
    assert harness.last.tokens_per_second == {"code": 0.0, "prose": 0.0}


def test_percentiles_cover_one_minute() -> None:
    harness = Harness()
    harness.tick()
    assert (harness.last.ttft, harness.last.tpot) == (None, None)
    for number, seconds in enumerate((1.0, 2.0, 10.0)):
        harness.generate(str(number), "code", 11, seconds)
    harness.tick()
    assert harness.last.tpot == {"p50": 0.2, "p90": 1.0, "p99": 1.0}
    assert harness.last.ttft == {"p50": 0.0, "p90": 0.0, "p99": 0.0}
    harness.tick(120.0)
    assert harness.last.tpot is None


def test_depth_by_category_and_method() -> None:
    harness = Harness()
    reports = (
        traffic("code", "ngram", 1.0),
        traffic("code", "pool", 2.0),
        traffic("prose", "pool", 3.0),
        traffic("canary"),
    )
    harness.set_status(replace(STATUS, traffic=reports))
    harness.tick()
    assert harness.last.depth == {"code · ngram": 1.0, "code · pool": 2.0, "prose · pool": 3.0}
    assert [report.category for report in harness.overview.report().traffic] == ["code", "code", "prose"]


def test_load_and_flags() -> None:
    harness = Harness()
    harness.set_status(replace(STATUS, flags=SpeculationFlags(False, "ngram", 6)))
    harness.tick()
    last = harness.last
    assert (last.running, last.waiting, last.kv_use, last.speculating) == (3, 2, 0.25, False)


def test_drafting_ahead_covers_recent_rounds_of_draft_workers() -> None:
    harness = Harness()
    target = WorkerStatus("t", "t", "target", "ready", "", answers=1000, hits=0, late=1000)
    draft = WorkerStatus("d", "d", "draft", "ready", "", answers=100, hits=100)
    harness.set_workers(target, draft)
    harness.tick()
    assert (harness.last.prespeculation_hits, harness.last.late_drafts) == (None, None)
    harness.set_workers(target, replace(draft, answers=140, hits=130, late=4))
    harness.tick()
    assert (harness.last.prespeculation_hits, harness.last.late_drafts) == (0.75, 0.1)
    harness.set_workers(target, replace(draft, answers=2, hits=1))  # after a restart
    harness.tick()
    assert (harness.last.prespeculation_hits, harness.last.late_drafts) == (None, None)
    assert harness.overview.report().workers == (target, replace(draft, answers=2, hits=1))


def test_samples_are_bounded_and_selected_by_time() -> None:
    harness = Harness()
    for _ in range(MAX_SAMPLES + 5):
        harness.tick()
    times = [sample.time for sample in harness.overview.report().samples]
    assert times == [1000.0 + second for second in range(6, MAX_SAMPLES + 6)]
    assert [sample.time for sample in harness.overview.report(since=times[-3]).samples] == times[-2:]


def test_a_drift_has_the_time_of_its_first_sample() -> None:
    harness = Harness()
    report = replace(traffic("code"), drifts=1, drift=(0.9, 0.7))
    harness.set_status(replace(STATUS, traffic=(report, traffic("prose"), replace(report, category="canary"))))
    harness.tick()
    assert harness.overview.report().drifts == ()  # it happened before the first sample
    later = (replace(report, drifts=2, drift=(0.7, 0.3)), replace(report, category="prose", drift=(0.5, 0.8)))
    harness.set_status(replace(STATUS, traffic=(*later, replace(report, category="canary", drifts=2))))
    for _ in range(3):
        harness.tick()
    harness.set_status(replace(STATUS, traffic=()))
    harness.tick()
    harness.set_status(replace(STATUS, traffic=later))
    harness.tick()
    assert [(n.time, n.category, n.before, n.after) for n in harness.overview.report().drifts] == [
        (1002.0, "code", 0.7, 0.3),
        (1002.0, "prose", 0.5, 0.8),
    ]


def test_values_of_the_flags() -> None:
    report = Harness(served_model_name="mine").overview.report()
    assert (report.model, report.methods, report.max_depth) == ("mine", ("ngram",), 8)
    assert report.speculation == SpeculationFlags(True, "ngram", 6)


def test_samples_stop_with_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL", 0.0)
    harness = Harness()

    async def live() -> int:
        async with harness.overview.running():
            while len(harness.overview.report().samples) < 3:
                harness.now += 1.0
                await asyncio.sleep(0)
        return len(harness.overview.report().samples)

    async def later() -> tuple[int, int]:
        taken = await live()
        await asyncio.sleep(0)
        return taken, len(harness.overview.report().samples)

    taken, after = asyncio.run(later())
    assert taken == after >= 3


def test_sampling_continues_after_an_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "INTERVAL", 0.0)
    harness = Harness()
    calls = 0

    def read_status() -> EngineStatus:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("no")
        return STATUS

    harness.server.target.engine_status = read_status  # type: ignore[method-assign]

    async def live() -> None:
        async with harness.overview.running():
            while calls < 3:
                await asyncio.sleep(0)

    asyncio.run(live())
    assert harness.overview.report().samples
    assert "cannot take a dashboard sample" in caplog.text


def test_over_http() -> None:
    server = served()
    body = server.call("GET", "/v1/paceline/overview").json()
    assert (body["model"], body["samples"]) == ("fake", [])
    assert body["workers"][0]["name"] == "engine-0"
    assert server.call("GET", "/v1/paceline/overview?since=soon").status_code == 400


def test_audit_drift_is_a_symptom() -> None:
    harness = Harness()
    assert harness.overview.report().audit.symptoms == ()
    harness.set_status(replace(STATUS, audit=AuditCounts(audited=100, drifted=2)))
    audit = harness.overview.report().audit
    assert audit == AuditCounts(100, 2, 0)
    (symptom,) = audit.symptoms
    assert (symptom.name, symptom.figure) == ("audit_drift", 2)
    assert "turn speculation off" in symptom.remedy

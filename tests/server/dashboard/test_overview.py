"""What the dashboard is told: a sample a second, and the server as of now."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from paceline.core.output import StepOutput
from paceline.core.request import Request
from paceline.core.sequence import FinishReason, Origin
from paceline.core.speculation import SpeculationFlags
from paceline.core.worker_status import (
    AuditCounts,
    BreakerState,
    ClusterStatus,
    EngineStatus,
    TrafficStatus,
    WorkerStatus,
)
from paceline.server.dashboard import overview as module
from paceline.server.dashboard.overview import MAX_SAMPLES, Overview
from tests.server.fakes import Served, served

SNAPSHOT = EngineStatus(3, 2, 10, 40, 0, 0, SpeculationFlags(True, "ngram", 6), ())


def traffic(category: str, method: str = "ngram", depth: float = 1.0) -> TrafficStatus:
    return TrafficStatus(method, category, BreakerState.CLOSED, (0.5, 0.25), depth, {})


class Watched:
    """A server whose clock and engine are the test's."""

    def __init__(self, **config: Any) -> None:
        self.now = 1000.0
        self.server: Served = served(clock=lambda: self.now, **config)
        self.overview = Overview(self.server.gateway, lambda: self.now)
        self.be(SNAPSHOT)

    def be(self, snapshot: EngineStatus) -> None:
        self.server.target.engine_status = lambda: snapshot  # type: ignore[method-assign]

    def have(self, *workers: WorkerStatus) -> None:
        self.server.target.cluster_status = lambda: ClusterStatus(workers, 0)  # type: ignore[method-assign]

    def tick(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.overview.sample()

    def generate(self, name: str, category: str, tokens: int, seconds: float) -> None:
        """One token at once, the others after `seconds`."""
        request, metrics = Request(name, (1,), category=category), self.server.gateway.metrics
        metrics.record_submit(request)
        output = StepOutput(name, 0, 0, (1,), (Origin.PLAIN,), "")
        metrics.record_output(request, output, self.now)
        rest = replace(
            output, tokens=(1,) * (tokens - 1), origins=(Origin.PLAIN,) * (tokens - 1), finish_reason=FinishReason.STOP
        )
        metrics.record_output(request, rest, self.now + seconds)

    @property
    def last(self) -> module.Sample:
        return self.overview.report().samples[-1]


def test_tokens_per_second_by_category_over_the_last_seconds() -> None:
    watched = Watched()
    watched.tick()
    watched.generate("a", "code", 30, 1.0)
    watched.tick()
    assert watched.last.tokens_per_second == {"code": 30.0}
    watched.generate("b", "prose", 10, 1.0)
    watched.tick()
    assert watched.last.tokens_per_second == {"code": 15.0, "prose": 5.0}
    for _ in range(6):
        watched.tick()
    assert watched.last.tokens_per_second == {"code": 0.0, "prose": 0.0}


def test_percentiles_of_the_last_minute() -> None:
    watched = Watched()
    watched.tick()
    assert (watched.last.ttft, watched.last.tpot) == (None, None)
    for number, seconds in enumerate((1.0, 2.0, 10.0)):
        watched.generate(str(number), "code", 11, seconds)
    watched.tick()
    assert watched.last.tpot == {"p50": 0.2, "p90": 1.0, "p99": 1.0}
    assert watched.last.ttft == {"p50": 0.0, "p90": 0.0, "p99": 0.0}
    watched.tick(120.0)
    assert watched.last.tpot is None


def test_depth_by_category_and_method() -> None:
    watched = Watched()
    reports = (
        traffic("code", "ngram", 1.0),
        traffic("code", "pool", 2.0),
        traffic("prose", "pool", 3.0),
        traffic("canary"),
    )
    watched.be(replace(SNAPSHOT, traffic=reports))
    watched.tick()
    assert watched.last.depth == {"code · ngram": 1.0, "code · pool": 2.0, "prose · pool": 3.0}
    assert [report.category for report in watched.overview.report().traffic] == ["code", "code", "prose"]


def test_load_and_switch() -> None:
    watched = Watched()
    watched.be(replace(SNAPSHOT, flags=SpeculationFlags(False, "ngram", 6)))
    watched.tick()
    last = watched.last
    assert (last.running, last.waiting, last.kv_use, last.speculating) == (3, 2, 0.25, False)


def test_prespeculation_is_what_draft_workers_did_lately() -> None:
    watched = Watched()
    target = WorkerStatus("t", "t", "target", "ready", "", answers=1000, hits=0, late=1000)
    draft = WorkerStatus("d", "d", "draft", "ready", "", answers=100, hits=100)
    watched.have(target, draft)
    watched.tick()
    assert (watched.last.prespeculation_hits, watched.last.late_drafts) == (None, None)
    watched.have(target, replace(draft, answers=140, hits=130, late=4))
    watched.tick()
    assert (watched.last.prespeculation_hits, watched.last.late_drafts) == (0.75, 0.1)
    watched.have(target, replace(draft, answers=2, hits=1))  # it was restarted
    watched.tick()
    assert (watched.last.prespeculation_hits, watched.last.late_drafts) == (None, None)
    assert watched.overview.report().workers == (target, replace(draft, answers=2, hits=1))


def test_without_a_cluster_the_process_is_the_worker() -> None:
    watched = Watched()
    watched.be(replace(SNAPSHOT, traffic=(traffic("code", depth=1.0), traffic("prose", depth=2.0))))
    (worker,) = watched.overview.report().workers
    assert (worker.role, worker.state, worker.running, worker.kv_use) == ("target", "ready", 3, 0.25)
    assert (worker.depth, worker.alpha) == (1.5, 0.375)


def test_samples_are_bounded_and_asked_for_by_time() -> None:
    watched = Watched()
    for _ in range(MAX_SAMPLES + 5):
        watched.tick()
    times = [sample.time for sample in watched.overview.report().samples]
    assert times == [1000.0 + second for second in range(6, MAX_SAMPLES + 6)]
    assert [sample.time for sample in watched.overview.report(since=times[-3]).samples] == times[-2:]


def test_a_change_of_acceptance_is_noted_when_it_is_first_seen() -> None:
    watched = Watched()
    report = replace(traffic("code"), drifts=1, drift=(0.9, 0.7))
    watched.be(replace(SNAPSHOT, traffic=(report, traffic("prose"), replace(report, category="canary"))))
    watched.tick()
    assert watched.overview.report().drifts == ()  # it was there before
    later = (replace(report, drifts=2, drift=(0.7, 0.3)), replace(report, category="prose", drift=(0.5, 0.8)))
    watched.be(replace(SNAPSHOT, traffic=(*later, replace(report, category="canary", drifts=2))))
    for _ in range(3):
        watched.tick()
    watched.be(replace(SNAPSHOT, traffic=()))
    watched.tick()
    watched.be(replace(SNAPSHOT, traffic=later))
    watched.tick()
    assert [(n.time, n.category, n.before, n.after) for n in watched.overview.report().drifts] == [
        (1002.0, "code", 0.7, 0.3),
        (1002.0, "prose", 0.5, 0.8),
    ]


def test_what_the_switches_may_say() -> None:
    report = Watched(served_model_name="mine").overview.report()
    assert (report.model, report.methods, report.max_depth) == ("mine", ("ngram",), 8)
    assert report.speculation == SpeculationFlags(True, "ngram", 6)


def test_samples_are_taken_as_long_as_the_application_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL", 0.0)
    watched = Watched()

    async def live() -> int:
        async with watched.overview.lifespan(None):
            while len(watched.overview.report().samples) < 3:
                watched.now += 1.0
                await asyncio.sleep(0)
        return len(watched.overview.report().samples)

    async def later() -> tuple[int, int]:
        taken = await live()
        await asyncio.sleep(0)
        return taken, len(watched.overview.report().samples)

    taken, after = asyncio.run(later())
    assert taken == after >= 3


def test_a_look_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "INTERVAL", 0.0)
    watched = Watched()
    looks = 0

    def snapshot() -> EngineStatus:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise RuntimeError("no")
        return SNAPSHOT

    watched.server.target.engine_status = snapshot  # type: ignore[method-assign]

    async def live() -> None:
        async with watched.overview.lifespan(None):
            while looks < 3:
                await asyncio.sleep(0)

    asyncio.run(live())
    assert watched.overview.report().samples
    assert "cannot take a dashboard sample" in caplog.text


def test_over_http() -> None:
    server = served()
    body = server.call("GET", "/v1/paceline/overview").json()
    assert (body["model"], body["samples"]) == ("fake", [])
    assert body["workers"][0]["name"] == "engine"
    assert server.call("GET", "/v1/paceline/overview?since=soon").status_code == 400


def test_drift_that_an_audit_found_is_a_symptom() -> None:
    watched = Watched()
    assert watched.overview.report().workers[0].symptoms == ()
    watched.be(replace(SNAPSHOT, audit=AuditCounts(audited=100, drifted=2)))
    report = watched.overview.report()
    assert report.audit == AuditCounts(100, 2, 0)
    (symptom,) = report.workers[0].symptoms
    assert (symptom.name, symptom.figure) == ("audit_drift", 2)
    assert "turn speculation off" in symptom.remedy

"""Many workers as one engine, and as rows of a table."""

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from paceline.core.cluster_config import HealthConfig
from paceline.core.speculation import SpeculationFlags
from paceline.core.worker_status import (
    AuditCounts,
    BreakerState,
    DrafterStatus,
    EngineStatus,
    Symptom,
    TierCounts,
    TrafficStatus,
)
from paceline.runtime.deploy.directory import Member
from paceline.runtime.deploy.status import worker_statuses
from paceline.runtime.gateway_client.target_connection import TargetLine
from paceline.runtime.target_worker.kv_pressure import KvPressure
from paceline.runtime.target_worker.reports import NoDrafts, engine_report, merged_snapshot
from paceline.runtime.wire.stream_messages import Heartbeat, Welcome

TRAFFIC = TrafficStatus("pool", "code", BreakerState.CLOSED, (0.8, 0.6), 3.0, {"declined": 2})
SNAPSHOT = EngineStatus(3, 1, 10, 100, 2, 1, SpeculationFlags(True, "pool", 4), (TRAFFIC,))
OTHER = replace(
    SNAPSHOT,
    running=5,
    traffic=(replace(TRAFFIC, alphas=(0.4,), mean_depth=1.0, breaker=BreakerState.OPEN, fallbacks={"declined": 3}),),
)


class SomeDrafts(NoDrafts):
    def drafters(self) -> list[DrafterStatus]:
        return [DrafterStatus("draft-0", "ready", 4, 0.002, 0.001, 10, 7, 1)]

    def symptoms(self) -> list[Symptom]:
        return [Symptom("slow_draft", 0.03, 0.01, "less depth")]


def test_a_snapshot_of_all() -> None:
    merged = merged_snapshot([engine_report(n, 1, s, NoDrafts()) for n, s in (("a", SNAPSHOT), ("b", OTHER))])
    assert (merged.running, merged.waiting, merged.kv_used, merged.kv_total, merged.preemptions) == (8, 2, 20, 200, 4)
    assert merged.flags == SpeculationFlags(True, "pool", 4)
    (traffic,) = merged.traffic
    assert [round(alpha, 3) for alpha in traffic.alphas] == [0.6, 0.6]
    assert (traffic.mean_depth, traffic.breaker, traffic.fallbacks) == (2.0, BreakerState.OPEN, {"declined": 5})


def test_tiers_of_all_are_added_up() -> None:
    first = replace(SNAPSHOT, tiers=TierCounts(host_blocks=3, disk_hits=16, bad_blocks=1))
    second = replace(OTHER, tiers=TierCounts(host_blocks=4, disk_hits=32))
    reports = [engine_report(n, 1, s, NoDrafts()) for n, s in (("a", first), ("b", second), ("c", SNAPSHOT))]
    assert merged_snapshot(reports).tiers == TierCounts(host_blocks=7, disk_hits=48, bad_blocks=1)
    past = {("tiers", "disk_hits"): 100, ("tiers", "bad_blocks"): 2}
    assert merged_snapshot(reports, past).tiers == TierCounts(host_blocks=7, disk_hits=148, bad_blocks=3)
    assert merged_snapshot(reports[2:]).tiers is None


def test_what_workers_found_when_they_checked_themselves() -> None:
    ill = replace(OTHER, audit=AuditCounts(audited=100, drifted=2, dropped=1))
    reports = [engine_report(n, 1, s, SomeDrafts()) for n, s in (("a", SNAPSHOT), ("b", ill), ("c", ill))]
    assert merged_snapshot(reports).audit == AuditCounts(200, 4, 2)
    assert [[symptom.name for symptom in one.symptoms] for one in reports[:2]] == [
        ["slow_draft"],
        ["slow_draft", "audit_drift"],
    ]


def test_nobody_is_a_snapshot_too() -> None:
    assert merged_snapshot([]).running == 0


def test_rows_of_the_table() -> None:
    target, draft, unseen = (
        Member("target-0", "target", "target", "tcp://127.0.0.1:1"),
        Member("draft-0", "draft", "draft", "tcp://127.0.0.1:2"),
        Member("draft-1", "draft", "draft", "tcp://127.0.0.1:3"),
    )
    line = TargetLine(target, HealthConfig(), None, 1)
    try:
        starting = worker_statuses([target, draft], [line])
        assert [row.state for row in starting] == ["starting", "unseen"]
        line.beat(0.0)
        line.heard(Heartbeat(1, 9, 5, True, 3, 1, 10, 100), 0.2)
        assert line.round_trip is None  # it had to connect first
        line.welcome = Welcome(2, 1, 9, "target-0", "v", 40, 256, 8, 4, ["pool"], "pool")
        line.report = engine_report("target-0", 9, SNAPSHOT, SomeDrafts())
        line.beat(1.0)
        line.heard(Heartbeat(2, 9, 5, True, 3, 1, 10, 100), 1.004)
        line.beat(1.1)
        rows = worker_statuses([target, draft, unseen], [line])
    finally:
        line.close()
    assert [row.state for row in rows] == ["ready", "ready", "unseen"]
    one, two, _ = rows
    assert (one.running, one.waiting, one.kv_use, one.depth, one.round_trip) == (3, 1, 0.1, 3.0, pytest.approx(0.004))
    assert one.alpha is not None
    assert round(one.alpha, 3) == 0.7
    assert [(s.name, s.figure, s.limit) for s in one.symptoms] == [("slow_draft", 0.03, 0.01)]
    assert (two.running, two.answers, two.hits, two.late, two.round_trip) == (4, 10, 7, 1, 0.001)


@pytest.mark.parametrize(
    ("shares", "shown"), [([None], None), ([0.02, None], None), ([0.02], 0.02), ([0.0, 0.5], 0.25)]
)
def test_a_draft_worker_rests_when_it_drafts_ahead_for_no_target(
    shares: list[float | None], shown: float | None
) -> None:
    draft = Member("draft-0", "draft", "draft", "tcp://127.0.0.1:2")
    record = DrafterStatus("draft-0", "ready", 4, 0.002, 0.001, 10, 7, 1)
    lines = [
        SimpleNamespace(
            name=f"target-{i}",
            is_usable=True,
            report=SimpleNamespace(drafters=[msgspec.structs.replace(record, resting=share)]),
        )
        for i, share in enumerate(shares)
    ]
    (row,) = worker_statuses([draft], lines)  # type: ignore[arg-type]
    assert row.resting == shown


def test_preemptions_cost_depth_until_they_end() -> None:
    pressure, flags = KvPressure(), SpeculationFlags(max_depth=6)
    seen = [pressure.observe(replace(SNAPSHOT, preemptions=2 + i), 10 * i) for i in range(4)]
    assert seen == [False, False, False, True]
    assert [symptom.name for symptom in pressure.active] == ["kv_pressure"]
    assert pressure.limit(flags).max_depth == 1
    assert pressure.limit(SpeculationFlags(max_depth=0)).max_depth == 0
    calm = [pressure.observe(replace(SNAPSHOT, preemptions=5), 100 + 10 * i) for i in range(3)]
    assert calm == [False, False, True]
    assert pressure.limit(flags) is flags


def test_preemptions_without_speculation_are_not_its_fault() -> None:
    pressure = KvPressure()
    off = replace(SNAPSHOT, flags=SpeculationFlags(False, "pool", 4))
    assert not any(pressure.observe(replace(off, preemptions=i), 10 * i) for i in range(8))

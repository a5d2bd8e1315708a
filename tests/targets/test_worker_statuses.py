"""The rows of the worker table."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from paceline.core.cluster_config import HealthConfig
from paceline.core.request import SpeculationFlags
from paceline.core.status import BreakerState, DrafterStatus, EngineStatus, Symptom, TrafficStatus
from paceline.targets.connection import TargetConnection
from paceline.targets.status import worker_statuses
from paceline.wire.draft_messages import VERSION
from paceline.wire.gateway_messages import Heartbeat, StatusReport, Welcome
from paceline.wire.worker_spec import Member

DRAFTER = DrafterStatus("draft-0", "ready", 4, 0.002, 0.001, 10, 7, 1)
STATUS = EngineStatus(
    running=3,
    waiting=1,
    kv_used=10,
    kv_total=100,
    preemptions=2,
    invalid_drafts=1,
    flags=SpeculationFlags(True, "pool", 4),
    traffic=(
        TrafficStatus("pool", "code", BreakerState.CLOSED, (0.8, 0.6), 3.0, {"declined": 2}, drafted=40, accepted=23),
    ),
    drafters=(DRAFTER,),
    symptoms=(Symptom("slow_draft", 0.03, 0.01, "less depth"),),
)


def test_rows_of_targets_and_draft_workers() -> None:
    target, draft, unseen = (
        Member("target-0", "target", "target", "tcp://127.0.0.1:1"),
        Member("draft-0", "draft", "draft", "tcp://127.0.0.1:2"),
        Member("draft-1", "draft", "draft", "tcp://127.0.0.1:3"),
    )
    connection = TargetConnection(target, HealthConfig(), None, 1)
    try:
        starting = worker_statuses([target, draft], [connection])
        assert [row.state for row in starting] == ["joining", "joining"]
        connection.poll(0.0)
        connection.handle_heartbeat(Heartbeat(1, 9, 5, True, 3, 1, 10, 100), 0.2)
        assert connection.round_trip is None  # it had to connect first
        connection.welcome = Welcome(VERSION, 9, "target-0", "v", 40, 256, 8, 4, ["pool"], "pool")
        connection.report = StatusReport(9, "target-0", STATUS)
        connection.poll(1.0)
        connection.handle_heartbeat(Heartbeat(2, 9, 5, True, 3, 1, 10, 100), 1.004)
        connection.poll(1.1)
        rows = worker_statuses([target, draft, unseen], [connection])
        connection.health.disconnected()
        connection.poll(1.2)
        (lost,) = worker_statuses([target], [connection])
        assert (lost.state, lost.running, lost.waiting, lost.kv_use) == ("suspected", 0, 0, None)
    finally:
        connection.close()
    assert [row.state for row in rows] == ["ready", "ready", "joining"]
    one, two, _ = rows
    assert (one.running, one.waiting, one.kv_use, one.depth, one.round_trip) == (3, 1, 0.1, 3.0, pytest.approx(0.004))
    assert one.alpha is not None
    assert round(one.alpha, 3) == 0.7
    assert (one.drafted, one.accepted) == (40, 23)
    assert one.symptoms == STATUS.symptoms
    assert (two.running, two.answers, two.hits, two.late, two.round_trip) == (4, 10, 7, 1, 0.001)


def test_a_worker_that_drains_and_exits_is_not_called_suspected() -> None:
    member = Member("target-0", "target", "target", "tcp://127.0.0.1:1")
    connection = TargetConnection(member, HealthConfig(heartbeat=0.5, misses=4), None, 1)
    try:
        connection.handle_heartbeat(Heartbeat(1, 9, 5, False, 0, 0, 0, 100), 0.0)
        connection.poll(0.0)
        assert connection.condition == "is ready"
        connection.poll(3.0)
        assert connection.condition == "is suspected"
        connection.handle_heartbeat(Heartbeat(2, 9, 5, False, 0, 0, 0, 100, is_draining=True), 4.0)
        connection.poll(7.0)
        assert connection.condition == "does not answer while it drains"
        connection.health.disconnected()
        assert connection.condition == "has exited while draining"
        assert [row.state for row in worker_statuses([member], [connection])] == ["draining"]
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("shares", "shown"), [([None], None), ([0.02, None], None), ([0.02], 0.02), ([0.0, 0.5], 0.25)]
)
def test_draft_worker_that_drafts_ahead_for_no_target(shares: list[float | None], shown: float | None) -> None:
    draft = Member("draft-0", "draft", "draft", "tcp://127.0.0.1:2")
    targets = [
        SimpleNamespace(
            name=f"target-{i}", is_usable=True, status=replace(STATUS, drafters=(replace(DRAFTER, paused_share=share),))
        )
        for i, share in enumerate(shares)
    ]
    (row,) = worker_statuses([draft], targets)  # type: ignore[arg-type]
    assert row.paused_share == shown

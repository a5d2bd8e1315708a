"""Counts that never fall, whoever leaves or starts anew."""

from dataclasses import replace

import msgspec

from paceline.core.speculation import SpeculationFlags
from paceline.core.worker_status import BreakerState, EngineStatus, TrafficStatus
from paceline.runtime.gateway_client.past_reports import PastReports, counts_of
from paceline.runtime.target_worker.reports import NoDrafts, engine_report, merged_snapshot
from paceline.runtime.wire.stream_messages import StatusReport

TRAFFIC = TrafficStatus(
    "pool", "code", BreakerState.CLOSED, (0.8,), 3.0, {"declined": 2}, tested=10, kept=7, drifts=1, drift=(0.9, 0.7)
)


def report(name: str, epoch: int, preemptions: int, verify: float = 0.0) -> StatusReport:
    snapshot = EngineStatus(1, 0, 1, 10, preemptions, 0, SpeculationFlags(True, "pool", 4), (TRAFFIC,), 2.0)
    return engine_report(name, epoch, replace(snapshot, seconds={"verify": verify}), NoDrafts())


class Cluster:
    def __init__(self) -> None:
        self._past = PastReports()

    def snapshot(self, *reports: StatusReport) -> EngineStatus:
        return merged_snapshot(reports, self._past.besides(reports))


def test_a_worker_that_restarts_counts_on() -> None:
    cluster = Cluster()
    assert cluster.snapshot(report("a", 1, 10, 1.0), report("b", 1, 5, 1.0)).preemptions == 15
    again = cluster.snapshot(report("a", 1, 10, 1.0), report("b", 2, 1, 0.5))
    assert (again.preemptions, again.seconds["verify"]) == (16, 2.5)
    assert again.traffic[0].tested == 30
    assert again.traffic[0].fallbacks == {"declined": 6}
    assert cluster.snapshot(report("a", 1, 12, 1.0), report("b", 3, 0)).preemptions == 18


def test_a_worker_that_is_away_is_not_forgotten_nor_counted_twice_when_it_is_back() -> None:
    cluster = Cluster()
    cluster.snapshot(report("a", 1, 10), report("b", 1, 5))
    assert cluster.snapshot(report("a", 1, 11)).preemptions == 16
    assert cluster.snapshot().preemptions == 16
    assert cluster.snapshot(report("a", 1, 11), report("b", 1, 6)).preemptions == 17


def test_what_is_no_count_is_that_of_the_workers_there_are() -> None:
    cluster = Cluster()
    cluster.snapshot(report("a", 1, 10), report("b", 1, 5))
    alone = cluster.snapshot(report("a", 1, 10))
    assert (alone.running, alone.kv_total, alone.advantage) == (1, 10, 2.0)
    assert alone.traffic[0].drift == (0.9, 0.7)
    assert cluster.snapshot().advantage is None


def test_every_count_of_a_class_of_traffic_is_kept() -> None:
    """Whoever adds one to the message has to name it in `counts_of`, or a restart would undo it."""
    gauges = {"method", "category", "breaker", "alphas", "mean_depth", "drift"}
    names = {field.name for field in msgspec.structs.fields(TrafficStatus)} - gauges
    assert {key[0] for key, _ in counts_of(report("a", 1, 1)) if len(key) > 2} == names

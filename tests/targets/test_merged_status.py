"""The status of several target workers as one engine's. Its counters never decrease."""

from dataclasses import fields, replace

from paceline.core.request import SpeculationFlags
from paceline.core.status import AuditCounts, BreakerState, EngineStatus, TierCounts, TrafficStatus
from paceline.targets.status import ReportHistory, counters, merge_status
from paceline.wire.gateway_messages import TO_GATEWAY, StatusReport

TRAFFIC = TrafficStatus(
    "pool",
    "code",
    BreakerState.CLOSED,
    (0.8, 0.6),
    3.0,
    {"declined": 2},
    drafted=14,
    accepted=7,
    tested=10,
    drifts=1,
    drift=(0.9, 0.7),
)
STATUS = EngineStatus(3, 1, 10, 100, 2, 1, SpeculationFlags(True, "pool", 4), (TRAFFIC,), 2.0)
OTHER = replace(
    STATUS,
    running=5,
    traffic=(replace(TRAFFIC, alphas=(0.4,), mean_depth=1.0, breaker=BreakerState.OPEN, fallbacks={"declined": 3}),),
)


def report(name: str, epoch: int, preemptions: int, verify: float = 0.0) -> StatusReport:
    return StatusReport(epoch, name, replace(STATUS, preemptions=preemptions, seconds={"verify": verify}))


class Cluster:
    def __init__(self) -> None:
        self._history = ReportHistory()

    def status(self, *reports: StatusReport) -> EngineStatus:
        return merge_status([one.status for one in reports], self._history.missing(reports))


def test_status_is_encoded_as_it_is() -> None:
    status = replace(STATUS, tiers=TierCounts(host_blocks=3), audit=AuditCounts(1, 0, 0), seconds={"verify": 0.5})
    message = StatusReport(7, "a", status)
    assert TO_GATEWAY.decode(TO_GATEWAY.encode(message)) == message


def test_merge_adds_counts_and_averages_rates() -> None:
    merged = merge_status([STATUS, OTHER])
    assert (merged.running, merged.waiting, merged.kv_used, merged.kv_total, merged.preemptions) == (8, 2, 20, 200, 4)
    assert merged.flags == SpeculationFlags(True, "pool", 4)
    (traffic,) = merged.traffic
    assert [round(alpha, 3) for alpha in traffic.alphas] == [0.6, 0.6]
    assert (traffic.mean_depth, traffic.breaker, traffic.fallbacks) == (2.0, BreakerState.OPEN, {"declined": 5})


def test_merge_adds_tiers() -> None:
    first = replace(STATUS, tiers=TierCounts(host_blocks=3, disk_hits=16, bad_blocks=1))
    second = replace(OTHER, tiers=TierCounts(host_blocks=4, disk_hits=32))
    assert merge_status([first, second, STATUS]).tiers == TierCounts(host_blocks=7, disk_hits=48, bad_blocks=1)
    missing = {("tiers", "disk_hits"): 100, ("tiers", "bad_blocks"): 2}
    merged = merge_status([first, second, STATUS], missing)
    assert merged.tiers == TierCounts(host_blocks=7, disk_hits=148, bad_blocks=3)
    assert merge_status([STATUS]).tiers is None


def test_merge_adds_audit_counts() -> None:
    audited = replace(OTHER, audit=AuditCounts(audited=100, drifted=2, dropped=1))
    assert merge_status([STATUS, audited, audited]).audit == AuditCounts(200, 4, 2)


def test_merge_of_no_workers() -> None:
    assert merge_status([]).running == 0


def test_counters_of_a_restarted_worker_continue() -> None:
    cluster = Cluster()
    assert cluster.status(report("a", 1, 10, 1.0), report("b", 1, 5, 1.0)).preemptions == 15
    again = cluster.status(report("a", 1, 10, 1.0), report("b", 2, 1, 0.5))
    assert (again.preemptions, again.seconds["verify"]) == (16, 2.5)
    assert again.traffic[0].tested == 30
    assert again.traffic[0].fallbacks == {"declined": 6}
    assert cluster.status(report("a", 1, 12, 1.0), report("b", 3, 0)).preemptions == 18


def test_counters_of_an_absent_worker_count_once() -> None:
    cluster = Cluster()
    cluster.status(report("a", 1, 10), report("b", 1, 5))
    assert cluster.status(report("a", 1, 11)).preemptions == 16
    assert cluster.status().preemptions == 16
    assert cluster.status(report("a", 1, 11), report("b", 1, 6)).preemptions == 17


def test_gauges_include_present_workers_only() -> None:
    cluster = Cluster()
    cluster.status(report("a", 1, 10), report("b", 1, 5))
    alone = cluster.status(report("a", 1, 10))
    assert (alone.running, alone.kv_total, alone.advantage) == (3, 100, 2.0)
    assert alone.traffic[0].drift == (0.9, 0.7)
    assert cluster.status().advantage is None


def test_every_counter_of_a_traffic_class_is_listed() -> None:
    """A counter that `counters` does not list would decrease with a restart."""
    gauges = {"method", "category", "breaker", "alphas", "mean_depth", "drift"}
    names = {field.name for field in fields(TrafficStatus)} - gauges
    assert {key[0] for key, _ in counters(STATUS) if len(key) > 2} == names

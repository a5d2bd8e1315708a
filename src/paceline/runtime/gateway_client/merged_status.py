"""The status of all target workers as one engine's.

A worker that restarts counts from 0 again, and a worker that is away reports nothing. `ReportHistory` keeps the counts of
such workers, so that no sum over all workers ever decreases: a rate taken of it would show all of them again.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from paceline.core.speculation import SpeculationFlags
from paceline.core.status.engine import AuditCounts, BreakerState, EngineStatus, TierCounts, TrafficStatus
from paceline.runtime.wire.target_messages import StatusReport

Key = tuple[str, ...]
"""Name of a counter, then the traffic class, part or reason it counts."""

TIER_GAUGES = ("host_blocks", "disk_blocks")
"""Fields of `TierCounts` that hold a current value. All other fields are counters."""
SEVERITY = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


def counters(status: EngineStatus) -> Iterator[tuple[Key, int | float]]:
    """All counters of a status: the values that only grow."""
    yield ("preemptions",), status.preemptions
    yield ("invalid_drafts",), status.invalid_drafts
    yield ("generated",), status.generated
    yield ("audited",), status.audit.audited
    yield ("drifted",), status.audit.drifted
    yield ("dropped",), status.audit.dropped
    if status.tiers is not None:
        for field in fields(TierCounts):
            if field.name not in TIER_GAUGES:
                yield ("tiers", field.name), getattr(status.tiers, field.name)
    for part, seconds in status.seconds.items():
        yield ("seconds", part), seconds
    for reason, count in status.executor_steps.items():
        yield ("executor_steps", reason), count
    for traffic in status.traffic:
        for name in ("tested", "kept", "drifts"):
            yield (name, traffic.method, traffic.category), getattr(traffic, name)
        for reason, count in traffic.fallbacks.items():
            yield ("fallbacks", traffic.method, traffic.category, reason), count


class ReportHistory:
    """The last report of every worker, and the counters of processes that ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, StatusReport] = {}
        self._ended: Counter[Key] = Counter()

    def missing(self, reports: Sequence[StatusReport]) -> Mapping[Key, float]:
        """Counters of all processes other than those that sent `reports`, the current report of each worker."""
        with self._lock:
            for report in reports:
                before = self._last.get(report.name)
                if before is not None and before.epoch != report.epoch:
                    self._ended.update(dict(counters(before.status)))
                self._last[report.name] = report
            present = {report.name for report in reports}
            counts = Counter(self._ended)
            for name, report in self._last.items():
                if name not in present:
                    counts.update(dict(counters(report.status)))
            return counts


def merge_status(statuses: Sequence[EngineStatus], missing: Mapping[Key, float] | None = None) -> EngineStatus:
    """The status of all targets as that of one engine. Counters are added up, acceptance and depth are averaged. `missing` is
    added to the counters."""
    counts: Counter[Key] = Counter(missing or {})
    for status in statuses:
        counts.update(dict(counters(status)))
    traffic: dict[tuple[str, str], list[TrafficStatus]] = {}
    for status in statuses:
        for traffic_status in status.traffic:
            traffic.setdefault((traffic_status.method, traffic_status.category), []).append(traffic_status)
    return EngineStatus(
        running=sum(status.running for status in statuses),
        waiting=sum(status.waiting for status in statuses),
        kv_used=sum(status.kv_used for status in statuses),
        kv_total=sum(status.kv_total for status in statuses) or 1,
        preemptions=counts["preemptions",],
        invalid_drafts=counts["invalid_drafts",],
        flags=SpeculationFlags(
            any(status.flags.enabled for status in statuses),
            statuses[0].flags.method if statuses else "",
            max((status.flags.max_depth or 0 for status in statuses), default=0),
        ),
        traffic=tuple(_merge_traffic(name, parts, counts) for name, parts in traffic.items()),
        advantage=mean([status.advantage for status in statuses if status.advantage is not None]),
        seconds={key[1]: seconds for key, seconds in counts.items() if key[0] == "seconds"},
        executor_steps={key[1]: int(steps) for key, steps in counts.items() if key[0] == "executor_steps"},
        audit=AuditCounts(counts["audited",], counts["drifted",], counts["dropped",]),
        tiers=_merge_tiers([status.tiers for status in statuses if status.tiers is not None], counts),
        generated=counts["generated",],
    )


def _merge_tiers(parts: Sequence[TierCounts], counts: Counter[Key]) -> TierCounts | None:
    if not parts:
        return None
    gauges = {name: sum(getattr(part, name) for part in parts) for name in TIER_GAUGES}
    return TierCounts(
        **{field.name: gauges.get(field.name, counts["tiers", field.name]) for field in fields(TierCounts)}
    )


def _merge_traffic(name: tuple[str, str], parts: Sequence[TrafficStatus], counts: Counter[Key]) -> TrafficStatus:
    positions = max(len(part.alphas) for part in parts)
    by_position = [[part.alphas[i] for part in parts if i < len(part.alphas)] for i in range(positions)]
    reasons = dict.fromkeys(reason for part in parts for reason in part.fallbacks)
    return TrafficStatus(
        *name,
        breaker=max((part.breaker for part in parts), key=SEVERITY.__getitem__),
        alphas=tuple(sum(alphas) / len(alphas) for alphas in by_position),
        mean_depth=sum(part.mean_depth for part in parts) / len(parts),
        fallbacks={reason: counts["fallbacks", *name, reason] for reason in reasons},
        tested=counts["tested", *name],
        kept=counts["kept", *name],
        drifts=counts["drifts", *name],
        drift=max(parts, key=lambda part: part.drifts).drift,
    )


def mean(values: Sequence[float]) -> float | None:
    """The mean. None without values."""
    return sum(values) / len(values) if values else None

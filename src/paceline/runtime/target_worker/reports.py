"""What a target worker says about itself when asked, as messages and as values."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Protocol

from paceline.cluster.cost.symptoms import Symptom
from paceline.core.speculation import SpeculationFlags
from paceline.engine.stats.snapshot import AuditCounts, EngineSnapshot, TierReport, TrafficReport
from paceline.runtime.gateway_client.past_reports import Key, counts_of
from paceline.runtime.wire.report_messages import (
    AuditRecord,
    DrafterRecord,
    HandoffRecord,
    Report,
    SymptomRecord,
    TrafficRecord,
)
from paceline.runtime.wire.stream_messages import DrafterAddress
from paceline.speculation.depth.breaker import BreakerState


class DraftSide(Protocol):
    """A target's view of the draft pool. Called from the worker's thread, while the engine uses it on its own."""

    def set_workers(self, workers: Sequence[DrafterAddress]) -> None:
        """Use these draft workers and no others."""
        ...

    def tend(self) -> None:
        """Whatever is due; called often."""
        ...

    def drafters(self) -> Sequence[DrafterRecord]: ...

    def symptoms(self) -> Sequence[SymptomRecord]: ...

    def close(self) -> None: ...


class NoDrafts:
    """A target without a draft pool."""

    def set_workers(self, workers: Sequence[DrafterAddress]) -> None:
        pass

    def drafters(self) -> Sequence[DrafterRecord]:
        return ()

    def symptoms(self) -> Sequence[SymptomRecord]:
        return ()

    def tend(self) -> None:
        pass

    def close(self) -> None:
        pass


def engine_report(
    name: str,
    epoch: int,
    snapshot: EngineSnapshot,
    drafts: DraftSide,
    pressure: Sequence[Symptom] = (),
    handoffs: HandoffRecord | None = None,
) -> Report:
    return Report(
        epoch=epoch,
        name=name,
        running=snapshot.running,
        waiting=snapshot.waiting,
        kv_used=snapshot.kv_used,
        kv_total=snapshot.kv_total,
        preemptions=snapshot.preemptions,
        invalid_drafts=snapshot.invalid_drafts,
        enabled=bool(snapshot.flags.enabled),
        method=snapshot.flags.method or "",
        max_depth=snapshot.flags.max_depth or 0,
        traffic=[
            TrafficRecord(
                one.method,
                one.category,
                one.breaker.value,
                list(one.alphas),
                one.mean_depth,
                dict(one.fallbacks),
                one.tested,
                one.kept,
                one.drifts,
                one.drift,
            )
            for one in snapshot.traffic
        ],
        drafters=list(drafts.drafters()),
        symptoms=[
            *drafts.symptoms(),
            *(SymptomRecord(symptom.name, symptom.figure, symptom.limit, symptom.remedy) for symptom in pressure),
            *(SymptomRecord(one.name, one.figure, one.limit, one.remedy) for one in snapshot.audit.symptoms),
        ],
        handoffs=handoffs,
        audit=AuditRecord(snapshot.audit.audited, snapshot.audit.drifted, snapshot.audit.dropped),
        advantage=snapshot.advantage,
        seconds=dict(snapshot.seconds),
        tiers=None if snapshot.tiers is None else asdict(snapshot.tiers),
    )


def merged_snapshot(reports: Iterable[Report], past: Mapping[Key, float] | None = None) -> EngineSnapshot:
    """All targets as if they were one engine: counts added up, acceptance and depth averaged over them. `past`: what was
    counted by processes that do not report any more."""
    reports = list(reports)
    counts: Counter[Key] = Counter(past or {})
    for report in reports:
        counts.update(dict(counts_of(report)))
    traffic: dict[tuple[str, str], list[TrafficRecord]] = {}
    for report in reports:
        for record in report.traffic:
            traffic.setdefault((record.method, record.category), []).append(record)
    return EngineSnapshot(
        running=sum(report.running for report in reports),
        waiting=sum(report.waiting for report in reports),
        kv_used=sum(report.kv_used for report in reports),
        kv_total=sum(report.kv_total for report in reports) or 1,
        preemptions=counts["preemptions",],
        invalid_drafts=counts["invalid_drafts",],
        flags=SpeculationFlags(
            any(report.enabled for report in reports),
            reports[0].method if reports else "",
            max((report.max_depth for report in reports), default=0),
        ),
        traffic=tuple(_merged(method, category, records, counts) for (method, category), records in traffic.items()),
        advantage=_mean([report.advantage for report in reports if report.advantage is not None]),
        seconds={key[1]: seconds for key, seconds in counts.items() if key[0] == "seconds"},
        audit=AuditCounts(counts["audited",], counts["drifted",], counts["dropped",]),
        tiers=_tiers([report.tiers for report in reports if report.tiers is not None], counts),
    )


def _tiers(records: Sequence[Mapping[str, int]], counts: Counter[Key]) -> TierReport | None:
    """What is there now, and what was ever counted."""
    if not records:
        return None
    sums = {one.name: sum(record.get(one.name, 0) for record in records) for one in fields(TierReport)}
    return TierReport(**{name: counts.get(("tiers", name), total) for name, total in sums.items()})


_SEVERITY = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


def _merged(method: str, category: str, records: Sequence[TrafficRecord], counts: Counter[Key]) -> TrafficReport:
    positions = max(len(record.alphas) for record in records)
    at = [[record.alphas[i] for record in records if i < len(record.alphas)] for i in range(positions)]
    name = (method, category)
    reasons = dict.fromkeys(reason for record in records for reason in record.fallbacks)
    return TrafficReport(
        method=method,
        category=category,
        breaker=max((BreakerState(record.breaker) for record in records), key=_SEVERITY.__getitem__),
        alphas=tuple(sum(alphas) / len(alphas) for alphas in at),
        mean_depth=sum(record.mean_depth for record in records) / len(records),
        fallbacks={reason: counts["fallbacks", *name, reason] for reason in reasons},
        tested=counts["tested", *name],
        kept=counts["kept", *name],
        drifts=counts["drifts", *name],
        drift=max(records, key=lambda record: record.drifts).drift,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

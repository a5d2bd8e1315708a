"""What a target worker says about itself when asked, as messages and as values."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from paceline.cluster.symptoms import Symptom
from paceline.core.flags import SpeculationFlags
from paceline.engine.snapshot import EngineSnapshot, TrafficReport
from paceline.runtime.stream_messages import DrafterAddress, DrafterRecord, Report, SymptomRecord, TrafficRecord
from paceline.speculation.breaker import BreakerState


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
    name: str, epoch: int, snapshot: EngineSnapshot, drafts: DraftSide, pressure: Sequence[Symptom] = ()
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
                one.method, one.category, one.breaker.value, list(one.alphas), one.mean_depth, dict(one.fallbacks)
            )
            for one in snapshot.traffic
        ],
        drafters=list(drafts.drafters()),
        symptoms=[
            *drafts.symptoms(),
            *(SymptomRecord(symptom.name, symptom.figure, symptom.limit, symptom.remedy) for symptom in pressure),
        ],
    )


def merged_snapshot(reports: Iterable[Report]) -> EngineSnapshot:
    """All targets as if they were one engine: counts added up, acceptance and depth averaged over them."""
    reports = list(reports)
    traffic: dict[tuple[str, str], list[TrafficRecord]] = {}
    for report in reports:
        for record in report.traffic:
            traffic.setdefault((record.method, record.category), []).append(record)
    return EngineSnapshot(
        running=sum(report.running for report in reports),
        waiting=sum(report.waiting for report in reports),
        kv_used=sum(report.kv_used for report in reports),
        kv_total=sum(report.kv_total for report in reports) or 1,
        preemptions=sum(report.preemptions for report in reports),
        invalid_drafts=sum(report.invalid_drafts for report in reports),
        flags=SpeculationFlags(
            any(report.enabled for report in reports),
            reports[0].method if reports else "",
            max((report.max_depth for report in reports), default=0),
        ),
        traffic=tuple(_merged(method, category, records) for (method, category), records in traffic.items()),
    )


_SEVERITY = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


def _merged(method: str, category: str, records: Sequence[TrafficRecord]) -> TrafficReport:
    positions = max(len(record.alphas) for record in records)
    at = [[record.alphas[i] for record in records if i < len(record.alphas)] for i in range(positions)]
    fallbacks: dict[str, int] = {}
    for record in records:
        for reason, count in record.fallbacks.items():
            fallbacks[reason] = fallbacks.get(reason, 0) + count
    return TrafficReport(
        method=method,
        category=category,
        breaker=max((BreakerState(record.breaker) for record in records), key=_SEVERITY.__getitem__),
        alphas=tuple(sum(alphas) / len(alphas) for alphas in at),
        mean_depth=sum(record.mean_depth for record in records) / len(records),
        fallbacks=fallbacks,
    )

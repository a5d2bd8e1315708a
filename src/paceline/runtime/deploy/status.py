"""A cluster's workers as rows of a table: what a gateway hears from the targets, and through them of the drafts."""

from collections.abc import Iterable, Sequence

from paceline.cluster.routing.kv_router import KvRouter, RouterView
from paceline.core.worker_status import HandoffCounts, Symptom, WorkerStatus
from paceline.runtime.deploy.directory import Member
from paceline.runtime.gateway_client.canaries import CATEGORY
from paceline.runtime.gateway_client.target_connection import TargetLine
from paceline.runtime.wire.report_messages import DrafterRecord, HandoffRecord, Report
from paceline.runtime.wire.stream_messages import Loading

UNSEEN = "unseen"
"""No target has said anything about it."""


def worker_statuses(
    members: Iterable[Member], lines: Sequence[TargetLine], router: KvRouter | None = None
) -> list[WorkerStatus]:
    """A member without an address has not said yet where it is. `router`: what it knows of the targets is told too."""
    by_name = {line.name: line for line in lines}
    seen: dict[str, list[DrafterRecord]] = {}
    for line in lines:
        if line.report is not None and line.is_usable:
            for record in line.report.drafters:
                seen.setdefault(record.name, []).append(record)
    return [
        _draft(member, seen.get(member.name, []))
        if member.role == "draft" and member.address
        else _target(member, by_name.get(member.name), None if router is None else router.view(member.name))
        for member in members
    ]


def _target(member: Member, line: TargetLine | None, view: RouterView | None) -> WorkerStatus:
    if line is None or line.pulse is None:
        return WorkerStatus(member.name, member.pool, member.role, "starting", member.address)
    pulse, report = line.pulse, line.report
    return WorkerStatus(
        name=member.name,
        pool=member.pool,
        role=member.role,
        state=_loading(pulse.loading) if line.is_usable and pulse.loading is not None else line.state.value,
        address=member.address,
        running=pulse.running,
        waiting=pulse.waiting,
        kv_use=pulse.kv_used / pulse.kv_total if pulse.kv_total else None,
        depth=None if report is None else _mean([t.mean_depth for t in report.traffic if t.category != CATEGORY]),
        alpha=None if report is None else _alpha(report),
        round_trip=line.round_trip,
        answers=0 if report is None else sum(drafter.answers for drafter in report.drafters),
        hits=0 if report is None else sum(drafter.hits for drafter in report.drafters),
        late=0 if report is None else sum(drafter.late for drafter in report.drafters),
        symptoms=() if report is None else tuple(Symptom(s.name, s.figure, s.limit, s.remedy) for s in report.symptoms),
        preemptions=0 if report is None else report.preemptions,
        tokens=line.tokens,
        prompt_tokens=line.prompt_tokens,
        cached_tokens=line.cached_tokens,
        queue_seconds=None if view is None else view.queue_seconds,
        indexed_blocks=None if view is None else view.blocks,
        prefill_seconds=None if view is None else view.prefill_seconds,
        handoffs=None if report is None or report.handoffs is None else _handoffs(report.handoffs),
    )


def _draft(member: Member, records: Sequence[DrafterRecord]) -> WorkerStatus:
    if not records:
        return WorkerStatus(member.name, member.pool, member.role, UNSEEN, member.address)
    ready = [record for record in records if record.state == "ready"]
    return WorkerStatus(
        name=member.name,
        pool=member.pool,
        role=member.role,
        state="ready" if ready else records[0].state,
        address=member.address,
        running=sum(record.sequences for record in records),
        queue_seconds=_mean([record.queue_seconds for record in ready]),
        round_trip=_mean([record.round_trip for record in ready if record.round_trip]),
        answers=sum(record.answers for record in records),
        hits=sum(record.hits for record in records),
        late=sum(record.late for record in records),
        pass_seconds=_mean([record.pass_seconds for record in ready if record.pass_seconds]),
        resting=_resting(ready),
    )


def _resting(records: Sequence[DrafterRecord]) -> float | None:
    """A share, if it drafts ahead for none of its targets."""
    shares = [record.resting for record in records if record.resting is not None]
    return _mean(shares) if len(shares) == len(records) else None


def _handoffs(record: HandoffRecord) -> HandoffCounts:
    return HandoffCounts(record.done, record.failed, record.tokens, record.bytes, record.seconds, record.peer_tokens)


def _loading(progress: Loading) -> str:
    if progress.layers == progress.total:
        return "warming up"
    peers = f"{progress.peers} peer{'' if progress.peers == 1 else 's'}" if progress.peers else "disk"
    return f"loading {progress.layers}/{progress.total} layers from {peers}"


def _alpha(report: Report) -> float | None:
    return _mean([alpha for traffic in report.traffic if traffic.category != CATEGORY for alpha in traffic.alphas])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

"""The status of all target workers as one engine's, and the workers of a cluster as rows of a table.

A worker that restarts counts from 0 again, and a worker that is away reports nothing. `ReportHistory` keeps the counts of
such workers, so that no sum over all workers ever decreases: a rate taken of it would show all of them again.

`worker_statuses` makes the rows from what targets report of themselves and of the draft workers.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace

from paceline.core.request import SpeculationFlags
from paceline.core.status import (
    AuditCounts,
    BreakerState,
    DrafterStatus,
    EngineStatus,
    TierCounts,
    TrafficStatus,
    WorkerStatus,
)
from paceline.policy.health import WorkerState
from paceline.policy.routing.kv_router import KvRouter, RouterView
from paceline.targets.connection import TargetConnection
from paceline.targets.targets import CATEGORY
from paceline.wire.gateway_messages import LoadProgress, StatusReport
from paceline.wire.worker_spec import Member

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
    yield ("audit_texts",), status.audit.texts
    yield ("audit_passes",), status.audit.busy_passes
    yield ("audit_steps",), status.audit.busy_steps
    if status.tiers is not None:
        for field in fields(TierCounts):
            if field.name not in TIER_GAUGES:
                yield ("tiers", field.name), getattr(status.tiers, field.name)
    for part, seconds in status.seconds.items():
        yield ("seconds", part), seconds
    for reason, count in status.executor_steps.items():
        yield ("executor_steps", reason), count
    for traffic in status.traffic:
        for name in ("drafted", "accepted", "tested", "drifts"):
            yield (name, traffic.method, traffic.category), getattr(traffic, name)
        for reason, count in traffic.fallbacks.items():
            yield ("fallbacks", traffic.method, traffic.category, reason), count


class ReportHistory:
    """The last report of every worker, and the counters of processes that ended. It is thread-safe."""

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
        audit=AuditCounts(
            counts["audited",],
            counts["drifted",],
            counts["dropped",],
            counts["audit_texts",],
            counts["audit_passes",],
            counts["audit_steps",],
            tuple(finding for status in statuses for finding in status.audit.findings),
        ),
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
        drafted=counts["drafted", *name],
        accepted=counts["accepted", *name],
        tested=counts["tested", *name],
        drifts=counts["drifts", *name],
        drift=max(parts, key=lambda part: part.drifts).drift,
    )


def mean(values: Sequence[float]) -> float | None:
    """The mean. None without values."""
    return sum(values) / len(values) if values else None


UNSEEN = "joining"
"""State of a worker without a heartbeat, or of a draft worker that no target has reported."""


def worker_statuses(
    members: Iterable[Member],
    targets: Sequence[TargetConnection],
    router: KvRouter | None = None,
    prices: Mapping[str, float | None] | None = None,
) -> list[WorkerStatus]:
    """One row per member, also for members without an address yet. `router` adds its estimates of the targets.

    `prices` holds the dollars per hour of a worker, by pool."""
    prices = prices or {}
    by_name = {target.name: target for target in targets}
    drafters: dict[str, list[DrafterStatus]] = {}
    for target in targets:
        if target.status is not None and target.is_usable:
            for drafter in target.status.drafters:
                drafters.setdefault(drafter.name, []).append(drafter)
    rows = []
    for member in members:
        if member.role == "draft" and member.address:
            row = _draft_row(member, drafters.get(member.name, []))
        else:
            row = _target_row(member, by_name.get(member.name), None if router is None else router.view(member.name))
        state = _state(member, by_name.get(member.name), row.state)
        rows.append(replace(row, life=member.life, state=state, price=prices.get(member.pool)))
    return rows


def _state(member: Member, target: TargetConnection | None, state: str) -> str:
    """The state in the table: the member's phase, unless `state` says more."""
    if member.phase == "gone":
        return "gone"
    if member.phase == "draining" or (target is not None and target.is_draining and state in ("ready", "suspected")):
        return "draining"
    return "joining" if member.phase == "trial" and state == "ready" else state


def _target_row(member: Member, target: TargetConnection | None, view: RouterView | None) -> WorkerStatus:
    if target is not None and target.refusal:
        return WorkerStatus(member.name, member.pool, member.role, "refused", member.address, refusal=target.refusal)
    if target is None or target.heartbeat is None:
        return WorkerStatus(member.name, member.pool, member.role, UNSEEN, member.address)
    heartbeat, status = target.heartbeat, target.status
    is_loading = target.is_usable and heartbeat.loading is not None
    is_lost = target.state is WorkerState.SUSPECTED  # its last heartbeat describes a process that may be gone
    traffic = [entry for entry in status.traffic if entry.category != CATEGORY] if status is not None else []
    drafters = status.drafters if status is not None else ()
    return WorkerStatus(
        name=member.name,
        pool=member.pool,
        role=member.role,
        state=_loading_text(heartbeat.loading) if is_loading and heartbeat.loading else target.state.value,
        address=member.address,
        running=0 if is_lost else heartbeat.running,
        waiting=0 if is_lost else heartbeat.waiting,
        kv_use=heartbeat.kv_used / heartbeat.kv_total if heartbeat.kv_total and not is_lost else None,
        depth=mean([entry.mean_depth for entry in traffic]),
        alpha=mean([alpha for entry in traffic for alpha in entry.alphas]),
        drafted=sum(entry.drafted for entry in traffic),
        accepted=sum(entry.accepted for entry in traffic),
        round_trip=target.round_trip,
        answers=sum(drafter.answers for drafter in drafters),
        hits=sum(drafter.hits for drafter in drafters),
        late=sum(drafter.late for drafter in drafters),
        symptoms=() if status is None else status.symptoms,
        preemptions=0 if status is None else status.preemptions,
        tokens=target.num_tokens,
        prompt_tokens=target.num_prompt_tokens,
        cached_tokens=target.num_cached_tokens,
        queue_seconds=None if view is None else view.queue_seconds,
        indexed_blocks=None if view is None else view.blocks,
        prefill_seconds=None if view is None else view.prefill_seconds,
        handoffs=None if status is None else status.handoffs,
        generated=0 if status is None else status.generated,
    )


def _draft_row(member: Member, drafters: Sequence[DrafterStatus]) -> WorkerStatus:
    if not drafters:
        return WorkerStatus(member.name, member.pool, member.role, UNSEEN, member.address)
    ready = [drafter for drafter in drafters if drafter.state == "ready"]
    paused_share = [drafter.paused_share for drafter in ready if drafter.paused_share is not None]
    return WorkerStatus(
        name=member.name,
        pool=member.pool,
        role=member.role,
        state="ready" if ready else drafters[0].state,
        address=member.address,
        running=sum(drafter.sequences for drafter in drafters),
        queue_seconds=mean([drafter.queue_seconds for drafter in ready]),
        round_trip=mean([drafter.round_trip for drafter in ready if drafter.round_trip]),
        answers=sum(drafter.answers for drafter in drafters),
        hits=sum(drafter.hits for drafter in drafters),
        late=sum(drafter.late for drafter in drafters),
        pass_seconds=mean([drafter.pass_seconds for drafter in ready if drafter.pass_seconds]),
        paused_share=mean(paused_share) if len(paused_share) == len(ready) else None,
        refusal="" if ready else next((drafter.refusal for drafter in drafters if drafter.refusal), ""),
    )


def _loading_text(progress: LoadProgress) -> str:
    if progress.layers == progress.total:
        return "warming up"
    peers = f"{progress.peers} peer{'' if progress.peers == 1 else 's'}" if progress.peers else "disk"
    how = " in place" if progress.in_place == progress.peers > 0 else ""
    return f"loading {progress.layers}/{progress.total} layers from {peers}{how}"

"""The workers of a cluster as rows of a table, from what targets report of themselves and of the draft workers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from paceline.cluster.health import WorkerState
from paceline.cluster.routing.kv_router import KvRouter, RouterView
from paceline.core.status.draft import DrafterStatus
from paceline.core.status.worker import WorkerStatus
from paceline.runtime.deploy.directory import Member
from paceline.runtime.gateway_client.canaries import CATEGORY
from paceline.runtime.gateway_client.merged_status import mean
from paceline.runtime.gateway_client.target_connection import TargetConnection
from paceline.runtime.wire.target_messages import LoadProgress

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

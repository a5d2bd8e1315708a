"""/admin/draft: tries another draft inside the engines of a server, under load, and reports the trial."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Annotated, Literal, cast

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from paceline.core.status import DraftCounts, DraftStatus
from paceline.gateway.api.bodies import Body
from paceline.gateway.api.errors import ApiError, BadRequest, Unavailable
from paceline.gateway.auth import request_key
from paceline.gateway.sessions import Gateway, ServedModels

logger = logging.getLogger(__name__)

Verdict = Literal["continue", "keep", "roll back", "mixed"]
ANSWER_SECONDS = 5.0
"""Time that workers have to report a swap."""
PAUSE = 0.02


class DraftSwapBody(Body):
    """The draft to try."""

    draft: Annotated[str, Field(min_length=1, max_length=4096)]
    """Name or folder on the machine of the workers, as the setting `draft`."""
    model: str | None = None
    """The served model; needed if there are several."""
    seconds: Annotated[float, Field(ge=0.0, le=86400.0)] = 600.0
    """Longest time of the trial. Without a proven gain the current draft stays. 0 uses the new draft at once."""
    period: Annotated[float, Field(ge=0.1, le=3600.0)] = 4.0
    """Seconds for which the current or the new draft is used before the trial may change to the other draft."""


class SwapCounts(BaseModel):
    """What a draft of the trial was measured on."""

    sequences: int = 0
    periods: int = 0
    goodput: float = 0.0
    """Tokens per second of one sequence."""


class DraftSwapReport(BaseModel):
    """A draft and its last swap."""

    draft: str
    """The draft in use. It is the new draft only after the verdict `keep`."""
    candidate: str | None = None
    """The new draft. null if there was no swap since the start."""
    verdict: Verdict | None = None
    """`continue` while the new draft loads or is tried. null if there was no swap since the start."""
    gain: float | None = None
    """Relative gain of the new draft in goodput, 0.1 for 10% more. null if it is not known."""
    reason: str = ""
    current_counts: SwapCounts = SwapCounts()
    """Measurements of the draft that was in use before the swap."""
    candidate_counts: SwapCounts = SwapCounts()


class WorkerDraft(DraftSwapReport):
    worker: str
    method: str


class DraftReport(DraftSwapReport):
    """All workers as one: `mixed` if their verdicts differ; the counts are sums, goodput and gain means over them."""

    workers: list[WorkerDraft]


class SwapRunning(ApiError):
    status, type = 409, "invalid_request_error"

    def __init__(self) -> None:
        super().__init__(
            "another draft is tried now: wait for its verdict (GET /admin/draft), or end it (DELETE /admin/draft)",
            code="swap_running",
        )


def draft_report(drafts: Mapping[str, DraftStatus]) -> DraftReport:
    """The report of the workers' drafts; at least one."""
    workers = [_worker(name, status) for name, status in sorted(drafts.items())]
    verdicts = {worker.verdict for worker in workers}
    verdict: Verdict | None = "continue" if "continue" in verdicts else "mixed"
    if len(verdicts) == 1:
        verdict = workers[0].verdict
    gains = [worker.gain for worker in workers if worker.gain is not None]
    tried = [worker for worker in workers if worker.verdict == verdict] or workers
    reason = (
        tried[0].reason if len(workers) == 1 else "; ".join(f"{worker.worker}: {worker.reason}" for worker in workers)
    )
    return DraftReport(
        draft=workers[0].draft,
        candidate=next((worker.candidate for worker in workers if worker.candidate is not None), None),
        verdict=verdict,
        gain=sum(gains) / len(gains) if gains else None,
        reason=reason,
        current_counts=_sum([worker.current_counts for worker in workers]),
        candidate_counts=_sum([worker.candidate_counts for worker in workers]),
        workers=workers,
    )


def _worker(name: str, status: DraftStatus) -> WorkerDraft:
    swap = status.swap
    if swap is None:
        return WorkerDraft(worker=name, method=status.method, draft=status.draft)
    return WorkerDraft(
        worker=name,
        method=status.method,
        draft=status.draft,
        candidate=swap.candidate,
        verdict=cast(Verdict, swap.verdict),
        gain=swap.gain,
        reason=swap.reason,
        current_counts=_counts(swap.of_current),
        candidate_counts=_counts(swap.of_candidate),
    )


def _counts(counts: DraftCounts) -> SwapCounts:
    return SwapCounts(sequences=counts.sequences, periods=counts.periods, goodput=counts.goodput)


def _sum(parts: list[SwapCounts]) -> SwapCounts:
    measured = [part.goodput for part in parts if part.goodput]
    return SwapCounts(
        sequences=sum(part.sequences for part in parts),
        periods=sum(part.periods for part in parts),
        goodput=sum(measured) / len(measured) if measured else 0.0,
    )


def draft_routes(models: ServedModels) -> APIRouter:
    """`/draft` below /admin, for keys with the scope `admin`."""
    router = APIRouter()

    def drafts_of(gateway: Gateway) -> dict[str, DraftStatus]:
        drafts = gateway.target.drafts()
        if not drafts:
            raise BadRequest(
                "no target worker drafts with a model of its own: set `draft` of the server or of the target pool "
                "(for a draft pool, use `paceline draft swap POOL FOLDER`)",
                code="no_draft",
            )
        return drafts

    @router.get("/draft")
    async def read_draft(model: Annotated[str | None, Query()] = None) -> DraftReport:
        """The draft in use, and the last trial of another one."""
        return draft_report(drafts_of(models.of(model)))

    @router.post("/draft")
    async def swap_draft(body: DraftSwapBody, http: Request) -> DraftReport:
        """Starts a trial of another draft and returns its state. The text of no request changes."""
        gateway = models.of(body.model)
        if draft_report(drafts_of(gateway)).verdict == "continue":
            raise SwapRunning
        logger.info("draft swap", extra={"who": request_key(http).name, "draft": body.draft})
        number = gateway.target.swap_draft(body.draft, body.seconds, body.period)
        for _ in range(int(ANSWER_SECONDS / PAUSE)):
            drafts = gateway.target.drafts()
            if drafts and all(report.swap is not None and report.swap.number == number for report in drafts.values()):
                return draft_report(drafts)
            await asyncio.sleep(PAUSE)
        if any(report.swap is not None and report.swap.number == number for report in drafts.values()):
            return draft_report(drafts)
        if drafts and draft_report(drafts).verdict == "continue":
            raise SwapRunning
        raise Unavailable("no target worker has started the trial: retry")

    @router.delete("/draft")
    async def end_swap(http: Request, model: Annotated[str | None, Query()] = None) -> DraftReport:
        """Ends the trial; the draft before it stays. Without a trial nothing changes."""
        gateway = models.of(model)
        drafts = drafts_of(gateway)
        if draft_report(drafts).verdict == "continue":
            logger.info("draft swap ended", extra={"who": request_key(http).name})
            gateway.target.swap_draft("", 0.0, 0.0)
            for _ in range(int(ANSWER_SECONDS / PAUSE)):
                drafts = gateway.target.drafts() or drafts
                if draft_report(drafts).verdict != "continue":
                    break
                await asyncio.sleep(PAUSE)
        return draft_report(drafts)

    return router

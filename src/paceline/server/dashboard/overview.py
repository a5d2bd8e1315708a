"""The last minutes of a server, a sample a second, for whoever looks at its dashboard."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from prometheus_client import Counter

from paceline.core.speculation import SpeculationFlags
from paceline.core.worker_status import WorkerStatus
from paceline.engine.stats.snapshot import AuditCounts, EngineSnapshot, TrafficReport
from paceline.server.dashboard.drift_notes import DriftNote, DriftNotes
from paceline.server.dashboard.recent_values import RecentValues
from paceline.server.gateway.gateway import Gateway

logger = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds from one sample to the next."""
KEPT = 300
"""Samples."""
RATE_WINDOW = 5.0
"""Seconds over which rates are taken."""
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
CANARY = "canary"
"""The category in which a cluster checks its own workers; nobody's traffic."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a chart shows for one moment."""

    time: float
    """Seconds since 1970."""
    tokens_per_second: Mapping[str, float]
    """By category."""
    depth: Mapping[str, float]
    """Recent mean by `category · method`."""
    ttft: Mapping[str, float] | None
    """Seconds, p50, p90 and p99 over the last minute."""
    tpot: Mapping[str, float] | None
    running: int
    waiting: int
    kv_use: float
    """Used share of the cache, 0 to 1."""
    speculating: bool
    prespeculation_hits: float | None
    """Of the rounds that draft workers answered lately, the share drafted before it was asked for; None: there were none."""
    late_drafts: float | None


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    time: float
    speculation: SpeculationFlags
    """As in force at the last step."""
    methods: tuple[str, ...]
    """What the flag `method` may be set to."""
    max_depth: int
    """What the flag `max_depth` is bounded by."""
    traffic: tuple[TrafficReport, ...]
    workers: tuple[WorkerStatus, ...]
    audit: AuditCounts
    """What the engines found when they checked their own texts."""
    drifts: tuple[DriftNote, ...]
    """The last changes of acceptance, oldest first."""
    samples: tuple[Sample, ...]
    """Oldest first."""


@dataclass(frozen=True, slots=True)
class _Totals:
    time: float
    tokens: Mapping[str, float]
    answers: int
    hits: int
    late: int


class Overview:
    """Lives on the event loop."""

    def __init__(self, gateway: Gateway, clock: Callable[[], float] = time.time) -> None:
        self._gateway, self._clock = gateway, clock
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._totals: deque[_Totals] = deque()
        self._drifts = DriftNotes()

    def sample(self) -> None:
        """Look at the server once."""
        snapshot, metrics, now = self._gateway.llm.snapshot(), self._gateway.metrics, self._clock()
        before, totals = self._advance(now)
        self._drifts.look(_served(snapshot), now)
        self._samples.append(
            Sample(
                time=now,
                tokens_per_second=_rates(before, totals),
                depth={f"{one.category} · {one.method}": one.mean_depth for one in _served(snapshot)},
                ttft=_percentiles(metrics.recent_first_token, metrics.clock()),
                tpot=_percentiles(metrics.recent_per_token, metrics.clock()),
                running=snapshot.running,
                waiting=snapshot.waiting,
                kv_use=snapshot.kv_used / snapshot.kv_total if snapshot.kv_total else 0.0,
                speculating=bool(snapshot.flags.enabled),
                prespeculation_hits=_share(totals.hits - before.hits, totals.answers - before.answers),
                late_drafts=_share(totals.late - before.late, totals.answers - before.answers),
            )
        )

    def report(self, since: float = 0.0) -> Report:
        """Everything as of now, and the samples later than `since`."""
        snapshot = self._gateway.llm.snapshot()
        return Report(
            model=self._gateway.config.model_name,
            time=self._clock(),
            speculation=snapshot.flags,
            methods=self._gateway.llm.methods,
            max_depth=self._gateway.llm.config.speculation.max_depth,
            traffic=_served(snapshot),
            workers=self._workers() or (_this_process(snapshot, self._gateway.is_ready),),
            audit=snapshot.audit,
            drifts=self._drifts.notes,
            samples=tuple(sample for sample in self._samples if sample.time > since),
        )

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """Inside the block there is a sample every `INTERVAL`."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while True:
            try:
                self.sample()
            except Exception:
                logger.exception("the dashboard lacks a sample")
            await asyncio.sleep(INTERVAL)

    def _advance(self, now: float) -> tuple[_Totals, _Totals]:
        """The totals `RATE_WINDOW` ago, or the first ones, and those of now."""
        drafts = [worker for worker in self._workers() if worker.role == "draft"]
        totals = _Totals(
            now,
            _by_category(self._gateway.metrics.generated),
            sum(worker.answers for worker in drafts),
            sum(worker.hits for worker in drafts),
            sum(worker.late for worker in drafts),
        )
        self._totals.append(totals)
        while len(self._totals) > 2 and self._totals[1].time <= now - RATE_WINDOW:
            self._totals.popleft()
        return self._totals[0], totals

    def _workers(self) -> tuple[WorkerStatus, ...]:
        status = self._gateway.llm.cluster_status()
        return () if status is None else status.workers


def _served(snapshot: EngineSnapshot) -> tuple[TrafficReport, ...]:
    return tuple(report for report in snapshot.traffic if report.category != CANARY)


def _by_category(counter: Counter) -> dict[str, float]:
    return {
        sample.labels["category"]: sample.value
        for metric in counter.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


def _rates(before: _Totals, now: _Totals) -> dict[str, float]:
    seconds = now.time - before.time
    return {
        category: max(0.0, count - before.tokens.get(category, 0.0)) / seconds if seconds > 0 else 0.0
        for category, count in now.tokens.items()
    }


def _percentiles(values: RecentValues, now: float) -> dict[str, float] | None:
    found = values.percentiles(tuple(PERCENTILES.values()), now)
    return None if found is None else dict(zip(PERCENTILES, found, strict=True))


def _share(part: int, whole: int) -> float | None:
    """None when nothing was counted; workers that restart count from 0 again, and that says nothing either."""
    return part / whole if 0 <= part <= whole and whole > 0 else None


def _this_process(snapshot: EngineSnapshot, is_ready: bool) -> WorkerStatus:
    traffic = _served(snapshot)
    alphas = [alpha for report in traffic for alpha in report.alphas]
    return WorkerStatus(
        name="engine",
        pool="this process",
        role="target",
        state="ready" if is_ready else "unhealthy",
        address="",
        running=snapshot.running,
        waiting=snapshot.waiting,
        kv_use=snapshot.kv_used / snapshot.kv_total if snapshot.kv_total else None,
        depth=sum(report.mean_depth for report in traffic) / len(traffic) if traffic else None,
        alpha=sum(alphas) / len(alphas) if alphas else None,
        symptoms=snapshot.audit.symptoms,
    )

"""Data of the dashboard: the current state, samples of the last five minutes, and a timeline of changes.

`Overview` takes one sample per second. `Timeline` has the changes of workers, symptoms and flags, found by comparing samples.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from prometheus_client import Counter

from paceline.core.request import SpeculationFlags
from paceline.core.status import AuditCounts, EngineStatus, TrafficStatus, WorkerStatus
from paceline.gateway.metrics import RecentValues
from paceline.gateway.sessions import Gateway
from paceline.policy.cost.cost import dollars_per_hour, recent_cost

logger = logging.getLogger(__name__)

MAX_EVENTS = 50
FLAG_NAMES = {"enabled": "speculation", "method": "method", "max_depth": "maximum depth"}


@dataclass(frozen=True, slots=True)
class Event:
    time: float
    """Seconds since 1970, of the sample that shows it."""
    text: str
    is_bad: bool = False


class Timeline:
    """Recent events, oldest first. The first update adds no event, because their time is unknown."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerStatus] | None = None
        self._flags: SpeculationFlags | None = None
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(self._events)

    def add(self, text: str, is_bad: bool, now: float) -> None:
        """Add an event that no status shows."""
        self._events.append(Event(now, text, is_bad))

    def update(self, workers: Iterable[WorkerStatus], flags: SpeculationFlags, now: float) -> None:
        """Compare with the previous call."""
        current = {worker.name: worker for worker in workers}
        if self._workers is not None and self._flags is not None:
            for text, is_bad in (*_worker_changes(self._workers, current), *_flag_changes(self._flags, flags)):
                self._events.append(Event(now, text, is_bad))
        self._workers, self._flags = current, flags


def _worker_changes(before: dict[str, WorkerStatus], now: dict[str, WorkerStatus]) -> list[tuple[str, bool]]:
    changes = [(f"{name} left", True) for name in before.keys() - now.keys()]
    for name, worker in now.items():
        old = before.get(name)
        if old is None:
            changes.append((f"{name} joined", False))
            continue
        if worker.life.last_exit and worker.life.started is None and old.life.started is not None:
            changes.append((f"{name} exited: {worker.life.last_exit}", True))
        if worker.life.restarts > old.life.restarts:
            changes.append((f"{name} restarted; its last exit: {worker.life.last_exit or 'unknown'}", True))
        if worker.state != old.state and not worker.state.startswith("loading"):
            changes.append((f"{name} is {worker.state}", worker.state in ("suspected", "unhealthy")))
        names, old_names = ({symptom.name for symptom in status.symptoms} for status in (worker, old))
        changes += [(f"{name}: {_words(symptom)}", True) for symptom in sorted(names - old_names)]
        changes += [(f"{name}: no more {_words(symptom)}", False) for symptom in sorted(old_names - names)]
    return changes


def _flag_changes(before: SpeculationFlags, now: SpeculationFlags) -> list[tuple[str, bool]]:
    changes = []
    for name, shown in FLAG_NAMES.items():
        value = getattr(now, name)
        if value != getattr(before, name):
            text = {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value
            changes.append((f"{shown}: {text}", False))
    return changes


def _words(name: str) -> str:
    return name.replace("_", " ")


INTERVAL = 1.0
"""Seconds between samples."""
MAX_SAMPLES = 300
MAX_DRIFTS = 20
RATE_WINDOW = 5.0
"""Seconds over which rates are computed."""
DRAFTS_WINDOW = 60.0
"""Seconds over which drafts are counted."""
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
CANARY = "canary"
"""Category of the gateway's own checks of its workers, which the dashboard leaves out."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One point of every chart."""

    time: float
    """Seconds since 1970."""
    tokens_per_second: Mapping[str, float]
    """Tokens per second by category."""
    depth: Mapping[str, float]
    """Recent mean depth by `category · method`."""
    ttft: Mapping[str, float] | None
    """Time to first token over the last minute, seconds: p50, p90, p99."""
    tpot: Mapping[str, float] | None
    """Time per output token over the last minute, seconds: p50, p90, p99."""
    running: int
    waiting: int
    kv_use: float
    """Used share of the KV cache, 0 to 1."""
    speculating: bool
    prespeculation_hits: float | None
    """Share of recent remote rounds that were drafted before the request; None without such rounds."""
    late_drafts: float | None
    """Share of recent remote rounds whose draft was late; None without such rounds."""


@dataclass(frozen=True, slots=True)
class DriftEvent:
    """A change in the acceptance of first drafts of one traffic class. The depth rule then learns acceptance again."""

    time: float
    """Seconds since 1970."""
    category: str
    method: str
    before: float
    """Acceptance before the change."""
    after: float


class DriftDetector:
    """Finds changes in the engine's drift counts. The time of an event is the time of the sample that shows it."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] | None = None
        self._events: deque[DriftEvent] = deque(maxlen=MAX_DRIFTS)

    @property
    def events(self) -> tuple[DriftEvent, ...]:
        """Oldest first."""
        return tuple(self._events)

    def update(self, traffic: Iterable[TrafficStatus], now: float) -> None:
        """Compares with the previous call. The first call adds no events: their time is unknown."""
        current = {(report.category, report.method): report for report in traffic}
        if self._counts is not None:
            for key, report in current.items():
                if report.drift is not None and report.drifts > self._counts.get(key, 0):
                    self._events.append(DriftEvent(now, report.category, report.method, *report.drift))
        self._counts = (self._counts or {}) | {key: report.drifts for key, report in current.items()}


@dataclass(frozen=True, slots=True)
class Report:
    """The state of one model of the server now, and its samples."""

    model: str
    models: tuple[str, ...]
    """All models of the server."""
    time: float
    speculation: SpeculationFlags
    """Flags in effect at the last step."""
    has_switches: bool
    """Whether an admin key may change flags."""
    methods: tuple[str, ...]
    """Values of the flag `method`."""
    max_depth: int
    """Upper bound of the flag `max_depth`."""
    traffic: tuple[TrafficStatus, ...]
    workers: tuple[WorkerStatus, ...]
    audit: AuditCounts
    """Results of the engines' checks of their own output."""
    drifts: tuple[DriftEvent, ...]
    """Recent changes of acceptance, oldest first."""
    events: tuple[Event, ...]
    """Recent changes of workers, symptoms and flags, oldest first."""
    dollars_per_hour: float | None
    """Price of all workers. None if no prices are given."""
    dollars_per_million: float | None
    """Price per million tokens generated over the last minute; None without prices or tokens."""
    drafts_last_minute: int
    """Rounds with drafts in the last minute."""
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
    """Samples one model of the server once per `INTERVAL`. All calls must come from the event loop's thread."""

    def __init__(
        self,
        gateway: Gateway,
        models: Sequence[str] = (),
        has_switches: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`models` names all models of the server. `has_switches` is true if the server has the routes that change flags."""
        self._gateway, self._has_switches, self._clock = gateway, has_switches, clock
        self._models = tuple(models) or (gateway.model,)
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._totals: deque[_Totals] = deque()
        self._drifts = DriftDetector()
        self._timeline = Timeline()
        self._drafts: deque[tuple[float, int]] = deque()
        """Times and numbers of drafts since the start, over the last minute."""

    def sample(self) -> None:
        """Adds a sample of the current state."""
        status, metrics, now = self._gateway.target.engine_status(), self._gateway.metrics, self._clock()
        before, totals = self._advance(now)
        self._drifts.update(_client_traffic(status), now)
        self._timeline.update(self._workers(), status.flags, now)
        self._drafts.append((now, metrics.num_drafts))
        while self._drafts[0][0] < now - DRAFTS_WINDOW:
            self._drafts.popleft()
        self._samples.append(
            Sample(
                time=now,
                tokens_per_second=_rates(before, totals),
                depth={f"{report.category} · {report.method}": report.mean_depth for report in _client_traffic(status)},
                ttft=_percentiles(metrics.recent_first_token, metrics.clock()),
                tpot=_percentiles(metrics.recent_per_token, metrics.clock()),
                running=status.running,
                waiting=status.waiting,
                kv_use=status.kv_used / status.kv_total if status.kv_total else 0.0,
                speculating=bool(status.flags.enabled),
                prespeculation_hits=_ratio(totals.hits - before.hits, totals.answers - before.answers),
                late_drafts=_ratio(totals.late - before.late, totals.answers - before.answers),
            )
        )

    def add_event(self, text: str, is_bad: bool) -> None:
        """Add an event of the gateway itself to the timeline."""
        self._timeline.add(text, is_bad, self._clock())

    def report(self, since: float = 0.0) -> Report:
        """The current state, and the samples after `since`, seconds since 1970."""
        status, workers = self._gateway.target.engine_status(), self._workers()
        return Report(
            model=self._gateway.model,
            models=self._models,
            time=self._clock(),
            speculation=status.flags,
            has_switches=self._has_switches,
            methods=self._gateway.target.methods,
            max_depth=self._gateway.target.max_depth,
            traffic=_client_traffic(status),
            workers=workers,
            audit=status.audit,
            drifts=self._drifts.events,
            events=self._timeline.events,
            dollars_per_hour=dollars_per_hour(workers),
            dollars_per_million=recent_cost(workers, self._gateway.metrics.tokens_per_second()),
            drafts_last_minute=self._gateway.metrics.num_drafts - (self._drafts[0][1] if self._drafts else 0),
            samples=tuple(sample for sample in self._samples if sample.time > since),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Takes samples inside the block."""
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
                logger.exception("cannot take a dashboard sample")
            await asyncio.sleep(INTERVAL)

    def _advance(self, now: float) -> tuple[_Totals, _Totals]:
        """The totals `RATE_WINDOW` ago, or the oldest ones, and the current totals."""
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
        return self._gateway.target.cluster_status().workers


def _client_traffic(status: EngineStatus) -> tuple[TrafficStatus, ...]:
    return tuple(report for report in status.traffic if report.category != CANARY)


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
    percentiles = values.percentiles(tuple(PERCENTILES.values()), now)
    return None if percentiles is None else dict(zip(PERCENTILES, percentiles, strict=True))


def _ratio(part: int, whole: int) -> float | None:
    """None without counts. A worker that restarts counts from 0, which would make a negative difference."""
    return part / whole if 0 <= part <= whole and whole > 0 else None

"""The last decisions of a planner: `/admin/plan` and the metrics `paceline_planner_*`."""

from collections import deque
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Query
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field

DECISIONS = 200
"""Changes that a gateway remembers."""
SAMPLES = 1080
"""Samples that a gateway remembers: three hours at an interval of ten seconds."""
GAUGES = (
    ("load", "Requests per second of the last interval, as the planner sees them.", "load"),
    ("forecast", "Requests per second that the planned sizes are for.", "forecast"),
    ("worker_capacity", "Requests per second of one target worker within the objective.", "capacity"),
    ("dollars_per_hour", "Cost of the planned sizes.", "dollars_per_hour"),
)


class PlannedSizes(BaseModel):
    """One decision of a planner."""

    model_config = ConfigDict(extra="forbid")

    time: float
    """Seconds since 1970."""
    sizes: dict[str, int]
    before: dict[str, int]
    cause: str = Field(max_length=32)
    reason: str = Field(max_length=1000)
    load: float = Field(allow_inf_nan=False)
    forecast: float = Field(allow_inf_nan=False)
    capacity: float = Field(allow_inf_nan=False)
    dollars_per_hour: float = Field(allow_inf_nan=False)
    is_enough: bool
    is_acting: bool
    """Whether the planner changes the pools; if not, it advises."""


class PlanSample(BaseModel):
    """The figures of one decision, for charts."""

    time: float
    load: float
    forecast: float
    capacity: float
    dollars_per_hour: float
    sizes: dict[str, int]
    is_enough: bool


class PlanReport(BaseModel):
    current: PlannedSizes | None
    """None if no planner reports to this gateway."""
    changes: list[PlannedSizes]
    """The last decisions that differ from the sizes before them, newest last."""
    samples: list[PlanSample]
    """The last decisions of all kinds, newest last."""


class PlannerStatus(Collector):
    def __init__(self) -> None:
        self._current: PlannedSizes | None = None
        self._changes: deque[PlannedSizes] = deque(maxlen=DECISIONS)
        self._samples: deque[PlanSample] = deque(maxlen=SAMPLES)
        self._num_decisions = self._num_changes = 0

    def add(self, decision: PlannedSizes) -> None:
        self._current = decision
        self._samples.append(PlanSample(**{name: getattr(decision, name) for name in PlanSample.model_fields}))
        self._num_decisions += 1
        if any(decision.sizes.get(role, 0) != size for role, size in decision.before.items()):
            self._changes.append(decision)
            self._num_changes += 1

    def report(self, since: float = 0.0) -> PlanReport:
        """Everything that is remembered; samples after `since`, seconds since 1970."""
        samples = [sample for sample in self._samples if sample.time > since]
        return PlanReport(current=self._current, changes=list(self._changes), samples=samples)

    def collect(self) -> Iterator[Metric]:
        decision = self._current
        if decision is None:
            return
        for name, text, field in GAUGES:
            yield GaugeMetricFamily(f"paceline_planner_{name}", text, value=getattr(decision, field))
        sizes = GaugeMetricFamily("paceline_planner_workers", "Workers that the planner wants.", labels=["role"])
        for role, count in decision.sizes.items():
            sizes.add_metric([role], count)
        yield sizes
        enough = "1 if the planned sizes cover the forecast, 0 if the limits forbid more."
        yield GaugeMetricFamily("paceline_planner_enough", enough, value=float(decision.is_enough))
        yield CounterMetricFamily("paceline_planner_decisions", "Decisions.", value=self._num_decisions)
        yield CounterMetricFamily("paceline_planner_changes", "Decisions that change a size.", value=self._num_changes)


def plan_routes(board: PlannerStatus) -> APIRouter:
    """/admin/plan, for keys with the scope `admin`."""
    router = APIRouter(prefix="/admin", tags=["admin"])

    @router.get("/plan")
    async def read_plan(since: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0) -> PlanReport:
        """The last decision of the planner, its changes, and its figures after `since`."""
        return board.report(since)

    @router.put("/plan")
    async def report_plan(decision: PlannedSizes) -> dict[str, Any]:
        """A planner reports its decision here."""
        board.add(decision)
        return {"status": "ok"}

    return router

"""`/admin/learning`: the samples for a learner, and their metrics."""

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Query
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import TypeAdapter
from starlette.responses import Response

from paceline.server.gateway.models import ServedModels
from paceline.server.learning.sample_ring import SampleBatch, SampleRing
from paceline.server.openai.errors import NotFound


class LearningMetrics(Collector):
    """Metrics of the samples of one model."""

    def __init__(self, model: str, ring: SampleRing) -> None:
        self._model, self._ring = model, ring

    def collect(self) -> Iterator[Metric]:
        ring = self._ring
        for name, text, value in (
            ("paceline_learning_samples", "Finished choices collected for `paceline learn`.", ring.num_added),
            ("paceline_learning_dropped_samples", "Samples dropped before a learner received them.", ring.num_dropped),
        ):
            counter = CounterMetricFamily(name, text, labels=["model"])
            counter.add_metric([self._model], value)
            yield counter
        gauge = GaugeMetricFamily("paceline_learning_tokens", "Tokens of samples in memory.", labels=["model"])
        gauge.add_metric([self._model], ring.num_tokens)
        yield gauge


def learning_routes(models: ServedModels) -> APIRouter:
    router = APIRouter(prefix="/admin/learning", tags=["admin"])
    adapter = TypeAdapter(SampleBatch)

    @router.get("/samples", response_model=SampleBatch)
    async def read_samples(after: Annotated[int, Query(ge=0)] = 0, model: str | None = None) -> Any:
        """Samples after the number `after`, oldest first, as token ids. Only keys that agreed to learning are in them."""
        ring = models.of(model).samples
        if ring is None:
            raise NotFound("this server collects no samples: set `learning: true`", code="not_found")
        return Response(adapter.dump_json(ring.after(after)), media_type="application/json")

    return router

"""The metrics of several models as one page."""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class MergedRegistry(Collector):
    """Joins the series of equal families: a page may name each family once. The label `model` tells the series apart."""

    def __init__(self, registries: Sequence[CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for registry in self._registries:
            for metric in registry.collect():
                family = families.setdefault(metric.name, metric)
                if family is not metric:
                    family.samples.extend(metric.samples)
        yield from families.values()

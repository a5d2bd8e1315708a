"""Prometheus metrics."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.gateway.metrics.engine import EngineCollector
    from paceline.gateway.metrics.metrics import MergedRegistry, Metrics, RecentValues, process_registry

__all__ = ["EngineCollector", "MergedRegistry", "Metrics", "RecentValues", "process_registry"]

__getattr__ = lazy_face(
    __name__, {"engine": "EngineCollector", "metrics": "MergedRegistry Metrics RecentValues process_registry"}
)

"""The planner of live pools, and the size that a cluster needs for a load."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.planning.planner.gateway_metrics import MetricsReader, with_wanted
    from paceline.planning.planner.planner import HOLD_SECONDS, Decision, Planner, PlannerConfig
    from paceline.planning.planner.sizing import ClusterLimits, ClusterPlan, plan

__all__ = [
    "HOLD_SECONDS",
    "ClusterLimits",
    "ClusterPlan",
    "Decision",
    "MetricsReader",
    "Planner",
    "PlannerConfig",
    "plan",
    "with_wanted",
]

__getattr__ = lazy_face(
    __name__,
    {
        "gateway_metrics": "MetricsReader with_wanted",
        "planner": "Decision HOLD_SECONDS Planner PlannerConfig",
        "sizing": "ClusterLimits ClusterPlan plan",
    },
)

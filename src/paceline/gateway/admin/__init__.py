"""The routes of operators: the dashboard, drafts, the planner."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.gateway.admin.overview import Overview
    from paceline.gateway.admin.plan import PlannerStatus, plan_routes
    from paceline.gateway.admin.routes import (
        LearningMetrics,
        admin_routes,
        dashboard_routes,
        health_routes,
        learning_routes,
        overview_routes,
    )

__all__ = [
    "LearningMetrics",
    "Overview",
    "PlannerStatus",
    "admin_routes",
    "dashboard_routes",
    "health_routes",
    "learning_routes",
    "overview_routes",
    "plan_routes",
]

__getattr__ = lazy_face(
    __name__,
    {
        "overview": "Overview",
        "plan": "PlannerStatus plan_routes",
        "routes": "LearningMetrics admin_routes dashboard_routes health_routes learning_routes overview_routes",
    },
)

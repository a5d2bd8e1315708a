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
        "LearningMetrics": "routes",
        "Overview": "overview",
        "PlannerStatus": "plan",
        "admin_routes": "routes",
        "dashboard_routes": "routes",
        "health_routes": "routes",
        "learning_routes": "routes",
        "overview_routes": "routes",
        "plan_routes": "plan",
    },
)

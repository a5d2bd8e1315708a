"""/v1/paceline/overview: what the dashboard shows."""

from typing import Annotated

from fastapi import APIRouter, Query

from paceline.server.dashboard.overview import Overview, Report


def overview_routes(overview: Overview) -> APIRouter:
    router = APIRouter(tags=["operation"])

    @router.get("/v1/paceline/overview")
    async def report(since: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0) -> Report:
        """The server as of now, and a sample for every second after `since`, of the last five minutes."""
        return overview.report(since)

    return router

"""/health, /ready and /metrics."""

from fastapi import APIRouter
from starlette.responses import Response

from paceline.server.gateway.gateway import Gateway
from paceline.server.openai.errors import Unavailable
from paceline.server.openai.schemas.responses import State


def health_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(tags=["operation"])

    @router.head("/health", include_in_schema=False)  # as some load balancers ask
    @router.get("/health")
    async def health() -> State:
        """Whether the process is worth keeping."""
        if not gateway.llm.is_running:
            raise Unavailable("the engine has stopped: restart the server")
        return State(status="ok")

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def ready() -> State:
        """Whether to send requests here."""
        if not gateway.is_ready:
            raise Unavailable("the server is shutting down" if gateway.draining else "nothing is there to generate")
        return State(status="ready")

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """For Prometheus."""
        # The content type says the format's version, which `media_type` would add a second charset to
        return Response(gateway.metrics.render(), headers={"content-type": gateway.metrics.content_type})

    return router

"""Routes for operation: /health, /ready, /metrics, /admin and the dashboard.

The routes under `/admin/learning` give a learner its samples and take its metrics.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import prometheus_client
from fastapi import APIRouter, Header, Query, Request
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from paceline.core.request import MAX_DEPTH
from paceline.core.version import VERSION
from paceline.gateway.admin.drafts import draft_routes
from paceline.gateway.admin.overview import Overview, Report
from paceline.gateway.admin.weights import weights_routes
from paceline.gateway.api.errors import NotFound, Unavailable
from paceline.gateway.api.responses import HealthStatus
from paceline.gateway.auth import request_key
from paceline.gateway.metrics import MergedRegistry, Metrics, process_registry
from paceline.gateway.sessions import SampleBatch, SampleRing, ServedModels

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class FlagChanges(BaseModel):
    """Flags to change. An absent flag stays; null returns it to the configuration."""

    model_config = ConfigDict(extra="forbid", strict=True)

    enabled: bool | None = None
    method: str | None = None
    max_depth: int | None = Field(None, ge=0, le=MAX_DEPTH)


class VersionReport(BaseModel):
    version: str


class FlagReport(BaseModel):
    flags: dict[str, Any]
    """Flags as set; null means that the configuration decides."""
    effective: dict[str, Any]
    """Flags in effect at the last step."""
    history: list[dict[str, Any]]


class AuditLogReport(BaseModel):
    records: int
    head: str
    """Hash of the last record. Store it elsewhere: `paceline audit verify --head` then detects a removed end."""


def health_routes(models: ServedModels) -> APIRouter:
    router = APIRouter(tags=["operation"])
    registry = MergedRegistry([process_registry(), *(gateway.metrics.registry for gateway in models)])

    @router.head("/health", include_in_schema=False)  # some load balancers send HEAD
    @router.get("/health")
    async def read_health() -> HealthStatus:
        """Whether the process works; 503 means restart it."""
        if (failure := models.failure) is not None:
            raise Unavailable(failure)
        return HealthStatus(status="ok")

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def read_readiness() -> HealthStatus:
        """Whether the server accepts requests now."""
        if not models.is_ready:
            raise Unavailable("the server is shutting down" if models.is_draining else "no target worker is ready")
        return HealthStatus(status="ready")

    @router.post("/ping", include_in_schema=False)
    @router.get("/ping", include_in_schema=False)
    async def read_ping() -> Response:
        """As /health, with an empty body; vLLM and SageMaker name it so."""
        if not any(gateway.target.is_running for gateway in models):
            raise Unavailable("the engine has stopped: restart the server")
        return Response(status_code=200)

    @router.get("/version")
    async def read_version() -> VersionReport:
        """The version of Paceline."""
        return VersionReport(version=VERSION)

    @router.head("/metrics", include_in_schema=False)
    @router.get("/metrics", response_class=Response)
    async def read_metrics() -> Response:
        """Prometheus metrics."""
        # `media_type` would add a second charset to the content type
        return Response(prometheus_client.generate_latest(registry), headers={"content-type": Metrics.content_type})

    return router


def admin_routes(models: ServedModels) -> APIRouter:
    """/admin: run-time flags of all models, drafts and the audit log's head, for keys with the scope `admin`."""
    gateway = models.first
    router = APIRouter(prefix="/admin", tags=["admin"])
    router.include_router(draft_routes(models))
    router.include_router(weights_routes(models))

    def report() -> FlagReport:
        return FlagReport(
            flags=asdict(gateway.flags.get()),
            effective=asdict(gateway.target.engine_status().flags),
            history=[asdict(change) for change in gateway.flags.history],
        )

    @router.get("/flags")
    async def read_flags() -> FlagReport:
        return report()

    @router.patch("/flags")
    async def change_flags(
        body: FlagChanges, http: Request, x_paceline_who: Annotated[str, Header()] = ""
    ) -> FlagReport:
        """Changes flags. The history records the key's name and the header X-Paceline-Who, or the client's address."""
        person = x_paceline_who or (http.client.host if http.client else "unknown")
        who, changes = f"{request_key(http).name} ({person[:128]})", body.model_dump(exclude_unset=True)
        await asyncio.to_thread(gateway.flags.update, changes, who)
        logger.info("flags changed", extra={"who": who, "flags": changes})
        if gateway.strict is not None:
            await gateway.strict.append("flags", who=who, changes=changes)
        return report()

    @router.get("/trail")
    async def read_audit_log() -> AuditLogReport:
        """Number of records and head of the audit log."""
        if gateway.strict is None:
            raise NotFound("this server has no audit log: set `audit_trail`", code="not_found")
        return AuditLogReport(records=gateway.strict.log.records, head=gateway.strict.log.head)

    return router


def dashboard_routes() -> APIRouter:
    """The pages and their files. They need no key: the data they show comes from routes that check keys."""
    router = APIRouter(include_in_schema=False)
    files = StaticFiles(directory=STATIC)

    async def send_file(path: str, http: Request) -> Response:
        response = await files.get_response(path, http.scope)
        response.headers.update(PAGE_HEADERS)
        return response

    @router.get("/")
    async def send_page(http: Request) -> Response:
        return await send_file("index.html", http)

    @router.get("/dashboard")
    async def send_dashboard(http: Request) -> Response:
        return await send_file("dashboard.html", http)

    @router.get("/docs")
    async def send_docs(http: Request) -> Response:
        return await send_file("docs.html", http)

    @router.get("/planner")
    async def send_planner(http: Request) -> Response:
        return await send_file("planner.html", http)

    @router.get("/dashboard/{path:path}")
    async def send_static(path: str, http: Request) -> Response:
        return await send_file(path, http)

    return router


def overview_routes(models: ServedModels, overviews: Mapping[str, Overview]) -> APIRouter:
    """The route /v1/paceline/overview returns the data of the dashboard. `overviews` holds one overview per model name."""
    router = APIRouter(tags=["operation"])

    @router.get("/v1/paceline/overview")
    async def read_overview(
        since: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0, model: str | None = None
    ) -> Report:
        """The state of a model now, and the samples after `since` of the last five minutes. The default is the first model."""
        gateway = models.first if model is None else models.of(model)
        return overviews[gateway.model].report(since)

    return router


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

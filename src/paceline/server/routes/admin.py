"""/admin: run-time switches and the trail's head, for keys with the scope `admin`. A server without keys has no such routes."""

import asyncio
import logging
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from pydantic import BaseModel, ConfigDict, Field

from paceline.core.speculation import MAX_DEPTH
from paceline.server.auth.middleware import caller_of
from paceline.server.auth.strict import StrictMode
from paceline.server.gateway.gateway import Gateway
from paceline.server.openai.errors import NotFound

logger = logging.getLogger(__name__)


class FlagChanges(BaseModel):
    """What is absent stays; null gives the choice back to the configuration."""

    model_config = ConfigDict(extra="forbid", strict=True)

    enabled: bool | None = None
    method: str | None = None
    max_depth: int | None = Field(None, ge=0, le=MAX_DEPTH)


class FlagReport(BaseModel):
    flags: dict[str, Any]
    """As set; null: left to the configuration."""
    effective: dict[str, Any]
    """As in force at the last step."""
    history: list[dict[str, Any]]


class TrailReport(BaseModel):
    records: int
    head: str
    """Keep it elsewhere, and `paceline audit verify --head` will find an end cut off."""


def admin_routes(gateway: Gateway, strict: StrictMode | None) -> APIRouter:
    router = APIRouter(prefix="/admin", tags=["admin"])

    def report() -> FlagReport:
        return FlagReport(
            flags=asdict(gateway.flags.get()),
            effective=asdict(gateway.llm.snapshot().flags),
            history=[asdict(change) for change in gateway.flags.history],
        )

    @router.get("/flags")
    async def read() -> FlagReport:
        return report()

    @router.patch("/flags")
    async def change(body: FlagChanges, http: Request, x_paceline_who: Annotated[str, Header()] = "") -> FlagReport:
        """The history has the key's name and, beside it, the header X-Paceline-Who; without that, the address."""
        beside = x_paceline_who or (http.client.host if http.client else "unknown")
        who, changes = f"{caller_of(http).name} ({beside[:128]})", body.model_dump(exclude_unset=True)
        await asyncio.to_thread(gateway.flags.update, changes, who)
        logger.info("flags changed", extra={"who": who, "flags": changes})
        if strict is not None:
            await strict.append("flags", who=who, changes=changes)
        return report()

    @router.get("/trail")
    async def trail() -> TrailReport:
        """How far the trail of strict mode has come."""
        if strict is None:
            raise NotFound("this server keeps no trail: set `audit_trail`", code="not_found")
        return TrailReport(records=strict.trail.records, head=strict.trail.head)

    return router

"""/admin/flags: run-time switches, behind a key of their own. Without a key in the configuration there are no such routes."""

import asyncio
import hmac
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request
from pydantic import BaseModel, ConfigDict, Field

from paceline.core.config import MAX_DEPTH
from paceline.server.errors import Unauthorised
from paceline.server.gateway import Gateway


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


def admin_routes(gateway: Gateway, key: str) -> APIRouter:
    def check(authorization: Annotated[str, Header()] = "") -> None:
        if not hmac.compare_digest(authorization.encode(), f"Bearer {key}".encode()):
            raise Unauthorised(
                "send the admin key: `Authorization: Bearer …`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    router = APIRouter(prefix="/admin", tags=["admin"], dependencies=[Depends(check)])

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
        """The header X-Paceline-Who goes into the history; without it, the address does."""
        who = x_paceline_who or (http.client.host if http.client else "unknown")
        await asyncio.to_thread(gateway.flags.update, body.model_dump(exclude_unset=True), who[:128])
        return report()

    return router

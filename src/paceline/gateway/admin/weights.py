"""/admin/weights: puts other weights of the same architecture in use while the server runs."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field, model_validator

from paceline.core.status import WeightsStatus
from paceline.gateway.api.bodies import Body, inconsistent
from paceline.gateway.api.errors import ApiError, BadRequest, Unavailable
from paceline.gateway.auth import request_key
from paceline.gateway.sessions import Gateway, ServedModels

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""Time that workers have to begin a change."""
PAUSE = 0.02
UNDER_WAY = ("loading", "waiting")


class WeightsBody(Body):
    """The weights to use."""

    folder: Annotated[str, Field(max_length=4096)] = ""
    """Name or folder on the machine of the workers, as the setting `model`."""
    peer: Annotated[str, Field(max_length=4096)] = ""
    """Address of the weight server of another worker, which has them."""
    model: str | None = None
    """The served model; needed if there are several."""
    seconds: Annotated[float, Field(ge=0.0, le=86400.0)] = 60.0
    """Time for requests that run. Those that are not finished then end with the code `weights_changed`."""

    @model_validator(mode="after")
    def _check(self) -> "WeightsBody":
        if bool(self.folder) == bool(self.peer):
            raise inconsistent("folder", "send either folder or peer")
        return self


class WorkerWeights(BaseModel):
    """The last change of one worker. All fields but its name are null or empty if there was none."""

    worker: str
    source: str | None = None
    state: Literal["loading", "waiting", "done", "failed"] | None = None
    reason: str = ""


class WeightsReport(BaseModel):
    system_fingerprint: str | None
    """null while workers differ, or if it is not known."""
    workers: list[WorkerWeights]


class ChangeRunning(ApiError):
    status, type = 409, "invalid_request_error"

    def __init__(self) -> None:
        super().__init__("weights are changed now: wait until it is done (GET /admin/weights)", code="change_running")


def weights_report(fingerprint: str, workers: Mapping[str, WeightsStatus | None]) -> WeightsReport:
    return WeightsReport(
        system_fingerprint=fingerprint or None,
        workers=[
            WorkerWeights(worker=name)
            if status is None
            else WorkerWeights(worker=name, source=status.source, state=status.state, reason=status.reason)
            for name, status in sorted(workers.items())
        ],
    )


def weights_routes(models: ServedModels) -> APIRouter:
    """`/weights` below /admin, for keys with the scope `admin`."""
    router = APIRouter()

    def report(gateway: Gateway) -> WeightsReport:
        return weights_report(gateway.target.fingerprint, gateway.target.weights())

    @router.get("/weights")
    async def read_weights(model: Annotated[str | None, Query()] = None) -> WeightsReport:
        """The last change of weights, by worker."""
        return report(models.of(model))

    @router.post("/weights")
    async def change_weights(body: WeightsBody, http: Request) -> WeightsReport:
        """Puts other weights in use and returns when all workers have them. Requests that arrive meanwhile wait."""
        gateway = models.of(body.model)
        if gateway.strict is not None:
            raise BadRequest(
                "the audit log names the weights of its start: restart the server with the new model",
                code="strict_mode",
            )
        if any(status is not None and status.state in UNDER_WAY for status in gateway.target.weights().values()):
            raise ChangeRunning
        logger.info("weights change", extra={"who": request_key(http).name, "source": body.folder or body.peer})
        names = set(gateway.target.weights())
        number = gateway.target.change_weights(body.folder, body.peer, body.seconds)
        is_kept = True  # also if the client leaves: the change goes on
        try:
            changed = await _finished(gateway, names, number)
            failed = {name: status.reason for name, status in changed.items() if status.state == "failed"}
            is_kept = len(failed) < len(changed)
        finally:
            gateway.target.settle_weights(is_kept)
        if not failed:
            return report(gateway)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(failed.items()))
        if is_kept:
            raise ApiError(f"some workers have the new weights, others refused them: {reasons}", code="weights_mixed")
        raise BadRequest(reasons, code="weights_refused")

    return router


async def _finished(gateway: Gateway, names: set[str], number: int) -> dict[str, WeightsStatus]:
    """The change of every worker of `names` that has not left, once all have finished it."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + ANSWER_SECONDS
    while True:
        workers = {name: status for name, status in gateway.target.weights().items() if name in names}
        begun = {name: status for name, status in workers.items() if status is not None and status.number == number}
        if workers and len(begun) == len(workers) and all(status.state not in UNDER_WAY for status in begun.values()):
            return begun
        if len(begun) < len(workers) or not workers:
            if loop.time() > deadline:
                raise Unavailable("not every target worker has begun the change: see GET /admin/weights, and retry")
        else:
            deadline = loop.time() + ANSWER_SECONDS
        await asyncio.sleep(PAUSE)

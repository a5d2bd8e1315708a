"""A uvicorn server that drains before it stops.

The first SIGTERM or Ctrl-C starts to drain: /ready returns 503, new requests are rejected, and running requests get
`drain_timeout` seconds. A second signal aborts them.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from paceline.server.gateway.models import ServedModels

logger = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
    """Calls `on_ready` when it accepts requests. `all_finished` is False if it aborted requests."""

    def __init__(self, settings: uvicorn.Config, models: ServedModels, on_ready: Callable[[], None]) -> None:
        super().__init__(settings)
        self.all_finished = True
        self._models, self._on_ready = models, on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain_task: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Replaces uvicorn's handler, which stops listening at once and raises the signal again at the end."""
        if self._loop is None:
            self.should_exit = True
            return
        self._loop.call_soon_threadsafe(self._stop, signal.Signals(sig).name)

    def _stop(self, signal_name: str) -> None:
        assert self._loop is not None
        if self._drain_task is None:
            logger.info("stopping", extra={"reason": signal_name})
            self._drain_task = self._loop.create_task(self._drain_and_exit())
        else:
            logger.warning("aborting running requests", extra={"reason": signal_name})
            self.all_finished = False
            self._models.abort()

    async def _drain_and_exit(self) -> None:
        self.all_finished = await self._models.drain() and self.all_finished
        self.should_exit = True

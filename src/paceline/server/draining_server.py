"""uvicorn, but told to stop it goes on serving while the gateway drains.

The first SIGTERM or Ctrl-C drains: /ready says 503, new requests are turned away, running ones get `drain_timeout` seconds.
A second one gives them up.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from paceline.server.gateway.gateway import Gateway

logger = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
    def __init__(self, settings: uvicorn.Config, gateway: Gateway, on_ready: Callable[[], None]) -> None:
        super().__init__(settings)
        self.all_served = True
        self._gateway, self._on_ready = gateway, on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's own would stop listening at once, and raise the signal again at the end."""
        if self._loop is None:
            self.should_exit = True
            return
        self._loop.call_soon_threadsafe(self._stop, signal.Signals(sig).name)

    def _stop(self, name: str) -> None:
        assert self._loop is not None
        if self._drain is None:
            logger.info("stopping", extra={"reason": name})
            self._drain = self._loop.create_task(self._finish())
        else:
            logger.warning("giving up what is running", extra={"reason": name})
            self.all_served = False
            self._gateway.abort()

    async def _finish(self) -> None:
        self.all_served = await self._gateway.drain() and self.all_served
        self.should_exit = True

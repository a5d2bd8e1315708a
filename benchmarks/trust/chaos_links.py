"""TCP proxies between the processes of `chaos.py`, and what a network does to their connections.

A `Link` stands in front of a process. It knows which process opened each connection, so that a partition separates two
processes and no others. TCP hides lost and repeated packets from a program: what a program sees of them is a connection that
stands still in one or both directions, is late, breaks, or cannot be made. A repeated connection sends again, over a connection
of its own, all bytes that a client has sent.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

BLOCK = 65536
RECORDED = 1 << 20
"""Bytes of a connection that can be repeated."""
POLL = 0.02
CLIENTS = "clients"
"""Name of the sources that are not processes of the cluster."""


@dataclass(frozen=True)
class Weather:
    """What happens to the connections of one source."""

    delay: float = 0.0
    """Seconds for each block of bytes."""
    stops_requests: bool = False
    """Whether no byte reaches the server."""
    stops_answers: bool = False
    """Whether no byte comes back."""
    is_cut: bool = False
    """Whether connections break, and no new one is made."""


FAIR = Weather()


@dataclass(eq=False)
class _Connection:
    source: str
    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    sent: bytearray = field(default_factory=bytearray)

    def abort(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Link:
    """A proxy in front of one process. Thread-safe; its connections live on a thread of its own."""

    def __init__(self, name: str, port: int, pids: Callable[[], dict[str, int]]) -> None:
        """`pids` returns the processes that may connect, by name; others are clients."""
        self.name = name
        self._port, self._pids = port, pids
        self._weather: dict[str, Weather] = {}
        self._connections: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._forward, "127.0.0.1", 0))
        self.port = int(self._server.sockets[0].getsockname()[1])

    @property
    def sources(self) -> list[str]:
        """Names of the processes that are connected."""
        return sorted({connection.source for connection in list(self._connections)})

    def set(self, source: str, weather: Weather) -> None:
        """The weather of this source's connections from now on."""

        async def change() -> None:
            self._weather[source] = weather
            for connection in [c for c in self._connections if weather.is_cut and c.source == source]:
                connection.abort()

        self._call(change())

    def repeat(self, source: str, seconds: float) -> int:
        """Repeats the connections of this source for a while. Returns how many there were."""

        async def replay(sent: bytes) -> None:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.write(sent)
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        while await reader.read(BLOCK):
                            pass
                writer.transport.abort()

        async def replay_all() -> int:
            recorded = [bytes(connection.sent) for connection in self._connections if connection.source == source]
            await asyncio.gather(*map(replay, recorded))
            return len(recorded)

        repeated: int = self._call(replay_all())
        return repeated

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            self._weather.clear()
            for connection in list(self._connections):
                connection.abort()
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

        self._call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _source(self, port: int) -> str:
        """The process whose end of a connection has this port."""
        for name, pid in self._pids().items():
            with suppress(psutil.Error):
                if any(c.laddr and c.laddr.port == port for c in psutil.Process(pid).net_connections("tcp")):
                    return name
        return CLIENTS

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            their_reader, their_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        source = self._source(writer.get_extra_info("peername")[1])
        connection = _Connection(source, (writer, their_writer))
        if self._weather.get(source, FAIR).is_cut:
            connection.abort()
            return
        self._connections.add(connection)
        try:
            await asyncio.gather(
                self._copy(connection, reader, their_writer, is_request=True),
                self._copy(connection, their_reader, writer, is_request=False),
            )
        finally:
            self._connections.discard(connection)
            connection.abort()

    async def _copy(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_request: bool
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(BLOCK):
                if is_request and len(connection.sent) < RECORDED:  # without a hole
                    connection.sent += data
                while (weather := self._weather.get(connection.source, FAIR)) and (
                    weather.stops_requests if is_request else weather.stops_answers
                ):
                    await asyncio.sleep(POLL)
                if weather.delay:
                    await asyncio.sleep(weather.delay)
                writer.write(data)
                await writer.drain()
        writer.close()

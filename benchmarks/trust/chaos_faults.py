"""The faults of `chaos.py`: killed, stopped and frozen processes, slow links, full disks, clock jumps."""

import asyncio
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CLOCK_PATCH = '''"""Adds the offset in the file CHAOS_CLOCK to the wall clock of this process."""
import os, time

_path, _time, _time_ns = os.environ["CHAOS_CLOCK"], time.time, time.time_ns


def _offset():
    try:
        with open(_path) as file:
            return float(file.read() or 0)
    except (OSError, ValueError):
        return 0.0


time.time = lambda: _time() + _offset()
time.time_ns = lambda: _time_ns() + int(_offset() * 1e9)
'''
DISK_SECONDS, LINK_SECONDS = 3.0, 4.0


class Link:
    """A TCP proxy in front of a worker, which delays every read by `delay` seconds."""

    def __init__(self, host: str, port: int) -> None:
        self.delay = 0.0
        self._to = host, port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        serve = asyncio.start_server(self._forward, "127.0.0.1", 0)
        server = asyncio.run_coroutine_threadsafe(serve, self._loop).result()
        self.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            their_reader, their_writer = await asyncio.open_connection(*self._to)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._copy(reader, their_writer), self._copy(their_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                if self.delay:
                    await asyncio.sleep(self.delay)
                writer.write(data)
                await writer.drain()
        writer.close()


@dataclass(frozen=True)
class Event:
    """One fault. The times are of `time.monotonic`."""

    fault: str
    where: str
    start: float
    end: float


class Faults:
    """Makes one random fault after the other. `pids` returns the workers' process ids by name; `gateway` is a process id."""

    def __init__(
        self,
        seed: int,
        pids: Callable[[], dict[str, int]],
        gateway: int,
        links: dict[str, Link],
        clock: Path,
        poison: Callable[[random.Random], str],
        every: float,
    ) -> None:
        """`every`: mean seconds between faults."""
        self.events: list[Event] = []
        self.kinds = {
            "kill": self._kill,
            "stop": self._stop,
            "slow link": self._slow,
            "full disk": self._fill,
            "clock jump": self._jump,
            "gateway freeze": self._freeze,
            "poison": poison,
        }
        if not links:  # workers on Ray are reached at their own addresses
            del self.kinds["slow link"]
        self._rng = random.Random(seed)
        self._pids, self._gateway, self._links, self._clock, self._every = pids, gateway, links, clock, every

    def run(self, until: float) -> None:
        """Makes faults until that time. Each fault of the list happens once before one repeats."""
        order: list[str] = []
        while time.monotonic() < until:
            order = order or self._rng.sample(list(self.kinds), len(self.kinds))
            name, start = order.pop(), time.monotonic()
            where = self.kinds[name](self._rng)
            self.events.append(Event(name, where, start, time.monotonic()))
            print(f"{start:10.1f}  {name}: {where}", flush=True)
            time.sleep(max(0.0, min(self._rng.expovariate(1 / self._every), until - time.monotonic())))

    def _kill(self, rng: random.Random) -> str:
        name, pid = self._any(rng)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return name

    def _stop(self, rng: random.Random) -> str:
        name, pid = self._any(rng)
        return f"{name} for {self._pause(pid, rng.uniform(1.0, 6.0)):.1f} s"

    def _freeze(self, rng: random.Random) -> str:
        return f"for {self._pause(self._gateway, rng.uniform(3.0, 15.0)):.1f} s"

    def _slow(self, rng: random.Random) -> str:
        name, delay = rng.choice(sorted(self._links)), rng.choice((0.01, 0.05, 0.2))
        self._links[name].delay = delay
        time.sleep(LINK_SECONDS)
        self._links[name].delay = 0.0
        return f"{name} by {delay:g} s"

    def _fill(self, rng: random.Random) -> str:
        """A file size limit of 0: every write to a file fails, as on a full disk."""
        name, pid = self._any(rng)
        with suppress(ProcessLookupError):
            before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
            time.sleep(DISK_SECONDS)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        return name

    def _jump(self, rng: random.Random) -> str:
        offset = rng.choice((-86_400.0, -60.0, 60.0, 86_400.0, 10 * 365 * 86_400.0))
        self._clock.write_text(str(offset))
        time.sleep(1.0)
        return f"by {offset:g} s"

    def _any(self, rng: random.Random) -> tuple[str, int]:
        return rng.choice(sorted(self._pids().items()))

    @staticmethod
    def _pause(pid: int, seconds: float) -> float:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
        return seconds

"""How other threads hand work to a thread that waits on sockets."""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import zmq


class Mailbox:
    """Commands from any thread, carried out on the one that calls `wait` and `run_all`."""

    def __init__(self) -> None:
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._bell, self._ring = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._ring, False)
        self._is_closed = False

    def put(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        if not self._is_closed:
            with suppress(BlockingIOError, OSError):  # rung often enough, or closed a moment ago
                os.write(self._ring, b"!")

    def wait(self, sockets: Iterable["zmq.Socket[Any]"], seconds: float) -> None:
        """Until a command comes, a socket has something to read, or the time is up."""
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        poller.poll(int(seconds * 1e3))
        with suppress(BlockingIOError):
            os.read(self._bell, 4096)

    def run_all(self) -> None:
        with suppress(Empty):
            while True:
                self._commands.get_nowait()()

    def close(self) -> None:
        self._is_closed = True
        os.close(self._bell)
        os.close(self._ring)

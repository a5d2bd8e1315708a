"""How other threads hand work to a thread that waits on sockets."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import zmq

from paceline.runtime.wire.wakeup import Bell


class Mailbox:
    """Commands from any thread, carried out on the one that calls `wait` and `run_all`."""

    def __init__(self) -> None:
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._bell = Bell()

    def put(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._bell.ring()

    def wait(self, sockets: Iterable["zmq.Socket[Any]"], seconds: float) -> None:
        """Until a command comes, a socket has something to read, or the time is up."""
        poller = zmq.Poller()
        poller.register(self._bell.descriptor, zmq.POLLIN)
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        poller.poll(int(seconds * 1e3))
        self._bell.quiet()

    def run_all(self) -> None:
        with suppress(Empty):
            while True:
                self._commands.get_nowait()()

    def close(self) -> None:
        self._bell.close()

"""Wake-up of a thread that waits on sockets, and a queue of commands for it."""

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import zmq


class Wakeup:
    """A pipe: any thread calls `notify`, and the waiting thread polls `fd`."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self._is_closed = False
        self._lock = threading.Lock()

    def notify(self) -> None:
        """Make `fd` readable. No effect after `close`."""
        with self._lock:  # another file may reuse a closed descriptor's number
            if not self._is_closed:
                with suppress(BlockingIOError):  # the pipe is full, hence readable
                    os.write(self._write_fd, b"!")

    def clear(self) -> None:
        """Make `fd` unreadable until the next `notify`."""
        with suppress(BlockingIOError):
            while os.read(self.fd, 4096):
                pass

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            os.close(self.fd)
            os.close(self._write_fd)


class CommandQueue:
    """Commands from any thread, run by the thread that calls `wait` and `run_all`."""

    def __init__(self) -> None:
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wakeup = Wakeup()

    def put(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._wakeup.notify()

    def wait(self, sockets: Iterable["zmq.Socket[Any]"], seconds: float) -> None:
        """Return when a command is queued, a socket is readable, or `seconds` have passed."""
        poller = zmq.Poller()
        poller.register(self._wakeup.fd, zmq.POLLIN)
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        poller.poll(int(seconds * 1e3))
        self._wakeup.clear()

    def run_all(self) -> None:
        with suppress(Empty):
            while True:
                self._commands.get_nowait()()

    def close(self) -> None:
        self._wakeup.close()

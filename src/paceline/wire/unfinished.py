"""Cuts connections whose message does not end.

ZeroMQ limits the size of a frame and the number of messages, but a message may have any number of frames, and all of them wait
in memory until the last one has arrived. Its sockets do not show them. The kernel counts the bytes of every connection, so a
thread compares: many bytes since the last whole message are a message that does not end. Linux and TCP only; on other systems,
and for local sockets, nothing is cut.
"""

import logging
import os
import socket as sockets
import struct
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

logger = logging.getLogger(__name__)

CHECK_MS = 100
"""Milliseconds between two looks at the connections."""
RECEIVED_OFFSET = 128
"""Place of `tcpi_bytes_received` in the kernel's `struct tcp_info`."""
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


@dataclass(slots=True)
class _Connection:
    num_messages: int
    """Whole messages at the last look."""
    received: int
    """Bytes at the last look that saw a new whole message."""


class UnfinishedMessages:
    """Watches the connections of one bound socket, on a thread of its own."""

    def __init__(self, socket: "zmq.Socket[bytes]", most: int) -> None:
        """`most` is the number of bytes without a whole message after which a connection is cut. All connections together may
        hold four times as many."""
        self._socket, self._most = socket, most
        self._monitor = socket.get_monitor_socket(EVENTS)
        self._messages: Counter[int] = Counter()
        """Whole messages by the descriptor of their connection."""
        self._open: dict[int, _Connection] = {}
        self.num_cut = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-unfinished", daemon=True)
        self._thread.start()

    def add(self, frame: zmq.Frame) -> None:
        """Counts a whole message. Called by the thread that receives it."""
        with suppress(zmq.ZMQError):
            self._messages[int(frame.get(zmq.SRCFD))] += 1

    def close(self) -> None:
        """Ends the thread. Call it before the socket is closed."""
        self._stop.set()
        self._thread.join()
        self._socket.disable_monitor()
        self._monitor.close(0)

    def _run(self) -> None:
        while not self._stop.wait(CHECK_MS / 1e3):
            self._read_events()
            self._look()

    def _read_events(self) -> None:
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            descriptor = event["value"]
            self._open.pop(descriptor, None)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._open[descriptor] = _Connection(self._messages[descriptor], 0)

    def _look(self) -> None:
        waiting = {}
        for descriptor, connection in self._open.items():
            received = _bytes_received(descriptor)
            if received is None:
                continue
            if self._messages[descriptor] != connection.num_messages:
                connection.num_messages, connection.received = self._messages[descriptor], received
            waiting[descriptor] = received - connection.received
        for descriptor in sorted(waiting, key=waiting.__getitem__, reverse=True):
            if waiting[descriptor] <= self._most and sum(waiting.values()) <= 4 * self._most:
                return
            logger.error("cut a connection: %d bytes came without the end of a message", waiting.pop(descriptor))
            self.num_cut += 1
            del self._open[descriptor]
            with suppress(OSError), sockets.socket(fileno=os.dup(descriptor)) as connection_socket:
                connection_socket.shutdown(sockets.SHUT_RDWR)


def _bytes_received(descriptor: int) -> int | None:
    """Bytes that a TCP connection of this process has received; None if this system does not say."""
    try:
        with sockets.socket(fileno=os.dup(descriptor)) as connection:
            info = connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, RECEIVED_OFFSET + 8)
    except (OSError, AttributeError):
        return None
    return struct.unpack_from("<Q", info, RECEIVED_OFFSET)[0] if len(info) == RECEIVED_OFFSET + 8 else None

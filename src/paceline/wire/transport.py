"""Typed messages over ZeroMQ: many `Connection`s (DEALER) to one `Listener` (ROUTER).

Sending never blocks and every queue is bounded: a message that does not fit is dropped, counted and reported to the caller.
Malformed messages are counted. Only `wait` and `receive` block, up to their timeout. One thread owns an endpoint; other threads
may call `post` and `wake`.

`Wakeup` wakes a thread that waits on sockets. `CommandQueue` is a queue of commands for such a thread.
"""

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import zmq

from paceline.core.errors import InvalidConfig, PacelineError
from paceline.wire.codec import Codec, MalformedMessage
from paceline.wire.curve import Authenticator, encrypt_client, encrypt_server, set_keepalive
from paceline.wire.draft_messages import MAX_MESSAGE_BYTES
from paceline.wire.keys import Security
from paceline.wire.unfinished import UnfinishedMessages


class Wakeup:
    """A pipe: any thread calls `notify`, and the waiting thread polls `fd`."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self._is_closed = False
        self._lock = threading.Lock()

    def notify(self) -> None:
        """Make `fd` readable. It has no effect after `close`."""
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


M = TypeVar("M")
Peer = bytes
"""Routing id of a connection at its listener. A client that reconnects is a new peer."""

QUEUE_MESSAGES = 1000
OUTBOX_MESSAGES = 10_000
UNFINISHED_BYTES = 8 * MAX_MESSAGE_BYTES
"""Bytes that a connection may send without the end of a message."""
RECONNECT_MS, RECONNECT_MAX_MS = 50, 2_000
LOCAL_RECONNECT_MAX_MS = 100
"""Longest delay between two attempts to connect to a process of this machine, which may still be loading."""


class AddressInUse(PacelineError):
    """A listener cannot bind its address."""


@dataclass(slots=True)
class TrafficCounters:
    """Counters of one endpoint."""

    received: int = 0
    sent: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    malformed: int = 0
    dropped: int = 0
    """Messages that were not sent, because the peer is gone or its queue is full."""


@dataclass(frozen=True, slots=True)
class Received(Generic[M]):
    peer: Peer
    message: M | MalformedMessage
    size: int


class _Endpoint(Generic[M]):
    def __init__(self, socket: "zmq.Socket[bytes]", codec: Codec[M]) -> None:
        self.traffic = TrafficCounters()
        self._socket = socket
        self._codec = codec
        self._outbox: deque[tuple[Peer, Any]] = deque(maxlen=OUTBOX_MESSAGES)
        self._wakeup = Wakeup()
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._wakeup.fd, zmq.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Wait for a message. Returns True if a message can be received, and False if `wake` was called or `seconds` have
        passed."""
        # A look at the socket's events is cheaper than a poll over two descriptors
        if _is_readable(self._socket):
            return True
        if seconds <= 0.0 and not self._outbox:
            return False
        ready = dict(self._poller.poll(_milliseconds(seconds)))
        if self._wakeup.fd in ready:
            self._wakeup.clear()
            while self._outbox:
                self._send(*self._outbox.popleft())
        return self._socket in ready

    def wake(self) -> None:
        """End a `wait` now. Any thread may call it."""
        self._wakeup.notify()

    def close(self) -> None:
        self._socket.close(linger=200)
        self._wakeup.close()

    def _post(self, peer: Peer, message: Any) -> None:
        self._outbox.append((peer, message))
        self.wake()

    def _send(self, peer: Peer, message: Any) -> bool:
        data = self._codec.encode(message)
        try:
            self._socket.send_multipart([peer, data] if peer else [data], zmq.DONTWAIT, copy=len(data) < 65536)
        except zmq.ZMQError as error:  # EAGAIN: the queue is full; EHOSTUNREACH: the peer is gone
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.traffic.dropped += 1
            return False
        self.traffic.sent += 1
        self.traffic.bytes_sent += len(data)
        return True

    def _decode(self, data: bytes) -> M | MalformedMessage:
        self.traffic.received += 1
        self.traffic.bytes_received += len(data)
        try:
            return self._codec.decode(data)
        except MalformedMessage as malformed:
            self.traffic.malformed += 1
            return malformed


class InvalidAddress(PacelineError):
    """An address is not one of ZeroMQ's, or its public key is not one of CURVE's."""


class Listener(_Endpoint[M]):
    """Bound to an address, serves many peers. Without `security` it binds loopback addresses only."""

    def __init__(self, address: str, codec: Codec[M], security: Security | None = None) -> None:
        """`address` is tcp://host:port, and port 0 selects a free port. Only clients in `security.allowed` may connect."""
        require_keys(address, security)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator: Authenticator | None = None
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.BACKLOG, 1024)
        _set_limits(socket)
        if security is not None:
            self._authenticator = Authenticator(self._context, security.allowed)
            encrypt_server(socket, security.own)
        super().__init__(socket, codec)
        self._unfinished = UnfinishedMessages(socket, UNFINISHED_BYTES)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise AddressInUse(f"cannot listen on {address}: {error}; choose another port") from None
        self.address = socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    @property
    def num_rejected(self) -> int:
        """Connection attempts with a public key that is not allowed."""
        return self._authenticator.num_rejected if self._authenticator else 0

    def receive(self, seconds: float = 0.0) -> Received[M] | None:
        """The next message of any peer. None if none arrives within `seconds`."""
        if not self.wait(seconds):
            return None
        try:
            frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
        self._unfinished.add(frames[-1])
        peer, *bodies = (frame.bytes for frame in frames)
        if len(bodies) != 1:
            self.traffic.malformed += 1
            return Received(peer, MalformedMessage(f"a message is one frame, got {len(bodies)}"), 0)
        return Received(peer, self._decode(bodies[0]), len(bodies[0]))

    def send(self, peer: Peer, message: Any) -> bool:
        """Send a message. Returns False if the peer is gone or its queue is full. The message is then dropped and counted."""
        return self._send(peer, message)

    def post(self, peer: Peer, message: Any) -> None:
        """`send` from another thread: sent when the owner next waits. Past the bound the oldest messages are dropped."""
        self._post(peer, message)

    @property
    def num_cut(self) -> int:
        """Connections that were cut because their message did not end."""
        return self._unfinished.num_cut

    def close(self) -> None:
        self._unfinished.close()
        super().close()
        if self._authenticator:
            self._authenticator.close()
        self._context.term()


class Connection(_Endpoint[M]):
    """A client's connection to a listener. It connects as soon as the listener exists, and reconnects after a loss."""

    def __init__(self, address: str, codec: Codec[M], security: Security | None = None) -> None:
        """`security.server` is the public key that the listener must prove to own."""
        if security is not None and security.server is None:
            raise InvalidConfig(f"connecting to {address} requires the server's public key: set `server`")
        self.address = address
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        _set_limits(socket)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, LOCAL_RECONNECT_MAX_MS if is_local(address) else RECONNECT_MAX_MS)
        try:
            if security is not None:
                assert security.server is not None
                encrypt_client(socket, security.own, security.server)
            super().__init__(socket, codec)
            self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            socket.connect(address)
        except (zmq.ZMQError, ValueError) as error:  # the address or the key comes from another process
            if hasattr(self, "_monitor"):
                socket.disable_monitor()
                self._monitor.close(0)
            if hasattr(self, "_wakeup"):
                self._wakeup.close()
            socket.close(linger=0)
            raise InvalidAddress(
                f"{address[:200]!r} cannot be connected to: {error}; correct its address or key"
            ) from None

    def was_disconnected(self) -> bool:
        """Whether the connection broke since the last call. ZeroMQ reconnects; messages in transit may be lost."""
        was_disconnected = False
        while _is_readable(self._monitor):
            self._monitor.recv_multipart(zmq.DONTWAIT)
            was_disconnected = True
        return was_disconnected

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        super().close()

    def receive(self, seconds: float = 0.0) -> M | MalformedMessage | None:
        """The next message, or the error of one that does not decode. None if none arrives within `seconds`."""
        if not self.wait(seconds):
            return None
        try:
            frames = self._socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None
        return self._decode(frames[0])

    def send(self, message: Any) -> bool:
        """Send a message. Returns False if the queue is full. The message is then dropped and counted."""
        return self._send(b"", message)

    def post(self, message: Any) -> None:
        """`send` from another thread: sent when the owner next waits."""
        self._post(b"", message)

    @property
    def socket(self) -> "zmq.Socket[bytes]":
        return self._socket


def wait_any(connections: list[Connection[Any]], seconds: float) -> list[Connection[Any]]:
    """Connections with a message to receive, within `seconds`."""
    if len(connections) == 1:
        return connections if connections[0].wait(seconds) else []
    ready = [c for c in connections if _is_readable(c.socket)]
    if ready or seconds <= 0.0:
        return ready
    poller = zmq.Poller()
    for connection in connections:
        poller.register(connection.socket, zmq.POLLIN)
    events = dict(poller.poll(_milliseconds(seconds)))
    return [c for c in connections if c.socket in events]


def require_keys(address: str, security: Security | None) -> None:
    """Raises `InvalidConfig` if other machines can reach `address` and there are no keys."""
    if security is None and not is_local(address):
        raise InvalidConfig(
            f"other machines can reach {address}: create keys with `paceline keys`, or listen on 127.0.0.1"
        )


def is_local(address: str) -> bool:
    """Whether only this machine can reach `address`."""
    parts = urlsplit(address)
    if parts.scheme in ("inproc", "ipc"):
        return True
    if parts.hostname == "localhost":
        return True
    try:
        return ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False


def _is_readable(socket: "zmq.Socket[bytes]") -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _milliseconds(seconds: float) -> int:
    """Rounded up: a ZeroMQ timeout of 0 would not wait at all."""
    return max(0, math.ceil(seconds * 1e3))


def _set_limits(socket: "zmq.Socket[bytes]") -> None:
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    set_keepalive(socket)

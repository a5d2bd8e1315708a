"""Typed messages over ZeroMQ: a `Listener` (ROUTER) that many `Connection`s (DEALER) talk to.

Neither blocks on sending and neither has a queue without a bound: what does not fit is refused and counted, and the caller
decides. Bytes that are no message are counted and dropped. Only `receive` waits, and never past its time. One thread owns
an endpoint; others may `post` to it or `wake` it.
"""

import math
from collections import deque
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import zmq

from paceline.core.errors import InvalidConfig, PacelineError
from paceline.runtime.wire.codec import Codec, Malformed
from paceline.runtime.wire.keys import Security
from paceline.runtime.wire.messages import MAX_MESSAGE_BYTES
from paceline.runtime.wire.socket_options import connect_encrypted, serve_encrypted, watch_peer
from paceline.runtime.wire.wakeup import Bell
from paceline.runtime.wire.zap import Gatekeeper

M = TypeVar("M")
Peer = bytes
"""Names a connection at its listener, for as long as it lasts. A client that reconnects is another peer."""

QUEUE_MESSAGES = 1000
OUTBOX_MESSAGES = 10_000
RECONNECT_MS, RECONNECT_MAX_MS = 50, 2_000


class AddressInUse(PacelineError):
    """A listener's address is taken."""


@dataclass(slots=True)
class Traffic:
    """Counters of one endpoint."""

    received: int = 0
    sent: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    malformed: int = 0
    refused: int = 0
    """Messages not sent: the peer is gone, or does not read what it was sent."""


@dataclass(frozen=True, slots=True)
class Received(Generic[M]):
    peer: Peer
    message: M | Malformed
    size: int
    user: str = ""
    """The client's public key; empty without CURVE."""


class _Endpoint(Generic[M]):
    def __init__(self, socket: "zmq.Socket[bytes]", codec: Codec[M]) -> None:
        self.traffic = Traffic()
        self._socket = socket
        self._codec = codec
        self._outbox: deque[tuple[Peer, Any]] = deque(maxlen=OUTBOX_MESSAGES)
        self._bell = Bell()
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._bell.descriptor, zmq.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Until something can be received (True), somebody calls `wake`, or the time is up."""
        # The socket first: a poll over two descriptors costs more than a look at what is there already
        if _is_readable(self._socket):
            return True
        if seconds <= 0.0 and not self._outbox:
            return False
        ready = dict(self._poller.poll(_milliseconds(seconds)))
        if self._bell.descriptor in ready:
            self._bell.quiet()
            while self._outbox:
                self._send(*self._outbox.popleft())
        return self._socket in ready

    def wake(self) -> None:
        """From any thread: end a `wait` now."""
        self._bell.ring()

    def close(self) -> None:
        self._socket.close(linger=200)
        self._bell.close()

    def _post(self, peer: Peer, message: Any) -> None:
        self._outbox.append((peer, message))
        self.wake()

    def _send(self, peer: Peer, message: Any) -> bool:
        data = self._codec.encode(message)
        try:
            self._socket.send_multipart([peer, data] if peer else [data], zmq.DONTWAIT, copy=len(data) < 65536)
        except zmq.ZMQError as error:  # EAGAIN: a full queue; EHOSTUNREACH: a peer that left
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.traffic.refused += 1
            return False
        self.traffic.sent += 1
        self.traffic.bytes_sent += len(data)
        return True

    def _decode(self, data: bytes) -> M | Malformed:
        self.traffic.received += 1
        self.traffic.bytes_received += len(data)
        try:
            return self._codec.decode(data)
        except Malformed as malformed:
            self.traffic.malformed += 1
            return malformed


class Listener(_Endpoint[M]):
    """Bound to an address, serves many peers. Without `security` it binds to this machine only."""

    def __init__(self, address: str, codec: Codec[M], security: Security | None = None) -> None:
        """`address`: tcp://host:port, port 0 for a free one. `security.allowed` are let in and nobody else."""
        if security is None and not is_local(address):
            raise InvalidConfig(
                f"{address} can be reached from other machines: give keys (`paceline keys`), or listen on 127.0.0.1"
            )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gatekeeper: Gatekeeper | None = None
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.BACKLOG, 1024)
        _limit(socket)
        if security is not None:
            self._gatekeeper = Gatekeeper(self._context, security.allowed.__contains__)
            serve_encrypted(socket, security.own)
        super().__init__(socket, codec)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise AddressInUse(f"cannot listen on {address}: {error}; choose another port") from None
        self.address = socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    @property
    def num_turned_away(self) -> int:
        """Clients whose key was not on the list."""
        return self._gatekeeper.num_refused if self._gatekeeper else 0

    def receive(self, seconds: float = 0.0) -> Received[M] | None:
        """The next message of any peer, or None when there is none within `seconds`."""
        if not self.wait(seconds):
            return None
        try:
            user = ""
            if self._gatekeeper is None:
                peer, *bodies = self._socket.recv_multipart(zmq.DONTWAIT)
            else:  # who it is stands with the frame, and costs one that is not copied
                frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
                peer, *bodies = [frame.bytes for frame in frames]
                user = str(frames[-1].get("User-Id"))
        except zmq.Again:
            return None
        if len(bodies) != 1:
            self.traffic.malformed += 1
            return Received(peer, Malformed(f"a message is one frame, got {len(bodies)}"), 0, user)
        return Received(peer, self._decode(bodies[0]), len(bodies[0]), user)

    def send(self, peer: Peer, message: Any) -> bool:
        """False, and counted, when the peer is gone or its queue is full."""
        return self._send(peer, message)

    def post(self, peer: Peer, message: Any) -> None:
        """`send` from another thread: it goes out when the owner next waits. The oldest are dropped past the bound."""
        self._post(peer, message)

    def close(self) -> None:
        super().close()
        if self._gatekeeper:
            self._gatekeeper.close()
        self._context.term()


class Connection(_Endpoint[M]):
    """One client's line to a listener. It may be made before the listener is there, and finds it again when it returns."""

    def __init__(self, address: str, codec: Codec[M], security: Security | None = None) -> None:
        """`security.server` is the public key that the listener must prove to own."""
        if security is not None and security.server is None:
            raise InvalidConfig(f"to connect to {address} the server's public key is needed: set `server`")
        self.address = address
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        _limit(socket)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        if security is not None:
            assert security.server is not None
            connect_encrypted(socket, security.own, security.server)
        super().__init__(socket, codec)
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(address)

    def was_cut(self) -> bool:
        """Whether the connection broke since the last look. It is being made anew; what was under way may be lost."""
        cut = False
        while _is_readable(self._monitor):
            self._monitor.recv_multipart(zmq.DONTWAIT)
            cut = True
        return cut

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        super().close()

    def receive(self, seconds: float = 0.0) -> M | Malformed | None:
        """The next message, `Malformed` for what is none, or None when nothing came within `seconds`."""
        if not self.wait(seconds):
            return None
        try:
            frames = self._socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None
        return self._decode(frames[0])

    def send(self, message: Any) -> bool:
        """False, and counted, when the queue is full: nobody reads at the other end."""
        return self._send(b"", message)

    def post(self, message: Any) -> None:
        """`send` from another thread: it goes out when the owner next waits."""
        self._post(b"", message)

    @property
    def socket(self) -> "zmq.Socket[bytes]":
        return self._socket


def wait_any(connections: list[Connection[Any]], seconds: float) -> list[Connection[Any]]:
    """Those that have something to receive, within `seconds`."""
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


def is_local(address: str) -> bool:
    """Whether only this machine can reach it."""
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
    """Rounded up: ZeroMQ counts whole ones, and 0 would not wait at all."""
    return max(0, math.ceil(seconds * 1e3))


def _limit(socket: "zmq.Socket[bytes]") -> None:
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    watch_peer(socket)

"""ZeroMQ sockets: the server's socket, a client's connection to it, and the channel that sends bytes over it.

Unlike the sockets for messages these carry a second frame with the bytes of a chunk. Sending does not copy it.
"""

import math
import struct
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from paceline.transfer.fair_queue import MAX_REQUESTS
from paceline.transfer.transfer import (
    CHUNK_BYTES,
    MAX_INFLIGHT_CHUNKS,
    ReceivedChunk,
    TransferFailed,
    decode_reply,
    require_keep_alive,
)
from paceline.wire.curve import encrypt_client, encrypt_server, set_keepalive
from paceline.wire.keys import KeyPair, Security
from paceline.wire.transfer_messages import TO_SERVER, ChunkReply, ChunkRequest, KeepAlive, Reply, ToServer
from paceline.wire.transport import AddressInUse, require_keys

Socket = zmq.Socket[bytes]
MAX_CONTROL_BYTES = 4096
SOCKET_BUFFER_BYTES = 4 << 20
KEY_REFUSED_EVENTS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
LOST_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
NO_DATA = memoryview(b"")


def bind_server_socket(context: "zmq.Context[Socket]", host: str, security: Security | None) -> Socket:
    """A socket bound to a free port of `host`. With `security` the context must have its authenticator already."""
    address = f"tcp://{f'[{host}]' if ':' in host else host}:0"
    require_keys(address, security)
    socket = context.socket(zmq.ROUTER)
    _set_options(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.BACKLOG, 1024)
    socket.setsockopt(zmq.IPV6, int(":" in host))
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES)
    if security is not None:
        encrypt_server(socket, security.own)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(0)
        raise AddressInUse(f"cannot serve transfers on {host}: {error}") from None
    return socket


class ServerConnection:
    """A client's socket to one server. It does not reconnect: a restarted server has none of its old transfers."""

    def __init__(self, address: str, own: KeyPair | None, server_key: str) -> None:
        """Raises TransferFailed for an invalid address or key, which come from another worker."""
        if not _is_address(address) or (own is not None and not _is_key(server_key)):
            raise TransferFailed(f"invalid handle: {address!r} is no address, or {server_key!r} no public key")
        self._address = address
        self._socket = _client_socket(address, own, server_key)
        self._monitor = self._socket.get_monitor_socket(KEY_REFUSED_EVENTS | LOST_EVENTS)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(address)

    def send(self, message: ToServer) -> None:
        try:
            self._socket.send(TO_SERVER.encode(message), zmq.DONTWAIT)
        except zmq.Again:  # a disconnected socket that does not reconnect has no queue
            raise self._lost() from None

    def receive(self, seconds: float) -> tuple[Reply, memoryview] | None:
        """A reply and the bytes that came with it, or None after `seconds`. Raises TransferFailed if the server refuses, is
        gone, or sends an invalid message."""
        ready = dict(self._poller.poll(math.ceil(seconds * 1e3)))
        if self._socket not in ready:  # messages that arrived before the disconnect are read first
            if self._monitor in ready:
                raise self._lost()
            return None
        frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
        return decode_reply(self._address, frames[0].buffer), frames[1].buffer if len(frames) == 2 else NO_DATA

    def is_broken(self) -> bool:
        return bool(self._monitor.poll(0))

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def _lost(self) -> TransferFailed:
        event = recv_monitor_message(self._monitor)["event"] if self._monitor.poll(0) else 0
        if event & KEY_REFUSED_EVENTS:
            return TransferFailed(f"{self._address} does not accept this worker's key: add it to the allowed keys")
        return TransferFailed(f"{self._address} is gone")


class SocketChannel:
    """The bytes of a chunk follow the reply as a second frame."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection

    def request(self, id: bytes, index: int, chunk: int, size: int) -> None:
        self._connection.send(ChunkRequest(id, index, chunk))

    def receive(self, seconds: float) -> ReceivedChunk | KeepAlive | None:
        received = self._connection.receive(seconds)
        if received is None:
            return None
        reply, data = received
        if isinstance(reply, ChunkReply):
            return ReceivedChunk(reply.index, reply.chunk, reply.checksum, data)
        return require_keep_alive(reply)

    def is_broken(self) -> bool:
        return self._connection.is_broken()

    def close(self) -> None:
        self._connection.close()


def _client_socket(address: str, own: KeyPair | None, server_key: str) -> Socket:
    socket: Socket = zmq.Context.instance().socket(zmq.DEALER)
    _set_options(socket)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    socket.setsockopt(zmq.MAXMSGSIZE, CHUNK_BYTES + MAX_CONTROL_BYTES)
    socket.setsockopt(zmq.RCVHWM, 2 * MAX_INFLIGHT_CHUNKS)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    if own is not None:
        encrypt_client(socket, own, server_key)
    return socket


def _set_options(socket: Socket) -> None:
    socket.setsockopt(zmq.SNDHWM, 4 * MAX_REQUESTS)
    socket.setsockopt(zmq.RCVHWM, 4 * MAX_REQUESTS)
    socket.setsockopt(zmq.SNDBUF, SOCKET_BUFFER_BYTES)
    socket.setsockopt(zmq.RCVBUF, SOCKET_BUFFER_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    set_keepalive(socket)


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme == "tcp" and bool(parts.hostname) and bool(parts.port)
    except ValueError:
        return False


def _is_key(text: str) -> bool:
    try:
        return len(z85.decode(text)) == 32
    except (KeyError, ValueError, struct.error):
        return False

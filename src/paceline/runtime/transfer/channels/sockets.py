"""ZeroMQ sockets for pieces: unlike those for messages they carry a second frame, and it is never copied on the way out."""

import struct
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from paceline.core.errors import InvalidConfig
from paceline.runtime.transfer.fair_queue import MAX_WANTS
from paceline.runtime.transfer.pieces import PIECE_BYTES, WINDOW_PIECES
from paceline.runtime.wire.keys import KeyPair, Security
from paceline.runtime.wire.socket_options import connect_encrypted, serve_encrypted, watch_peer
from paceline.runtime.wire.transport import AddressInUse, is_local

Socket = zmq.Socket[bytes]
CONTROL_BYTES = 4096
BUFFER_BYTES = 4 << 20


def giving_socket(context: "zmq.Context[Socket]", host: str, security: Security | None) -> Socket:
    """Bound to a free port of `host`. The context must have its gatekeeper already where there are keys."""
    address = f"tcp://{f'[{host}]' if ':' in host else host}:0"
    if security is None and not is_local(address):
        raise InvalidConfig(
            f"{host} can be reached from other machines: give keys (`paceline keys`), or give on 127.0.0.1"
        )
    socket = context.socket(zmq.ROUTER)
    _tune(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.BACKLOG, 1024)
    socket.setsockopt(zmq.IPV6, int(":" in host))
    socket.setsockopt(zmq.MAXMSGSIZE, CONTROL_BYTES)
    if security is not None:
        serve_encrypted(socket, security.own)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(0)
        raise AddressInUse(f"cannot give on {host}: {error}") from None
    return socket


def taking_socket(address: str, own: KeyPair | None, server: str) -> Socket:
    """`server`: the public key that the other end must prove to own."""
    socket: Socket = zmq.Context.instance().socket(zmq.DEALER)
    _tune(socket)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    socket.setsockopt(zmq.MAXMSGSIZE, PIECE_BYTES + CONTROL_BYTES)
    socket.setsockopt(zmq.RCVHWM, 2 * WINDOW_PIECES)
    # A depot that is gone is gone with its parcels: a line is made anew by whoever has another ticket
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    if own is not None:
        connect_encrypted(socket, own, server)
    return socket


def is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme == "tcp" and bool(parts.hostname) and bool(parts.port)
    except ValueError:
        return False


def is_key(text: str) -> bool:
    try:
        return len(z85.decode(text)) == 32
    except (KeyError, ValueError, struct.error):
        return False


def _tune(socket: Socket) -> None:
    socket.setsockopt(zmq.SNDHWM, 4 * MAX_WANTS)
    socket.setsockopt(zmq.RCVHWM, 4 * MAX_WANTS)
    socket.setsockopt(zmq.SNDBUF, BUFFER_BYTES)
    socket.setsockopt(zmq.RCVBUF, BUFFER_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    watch_peer(socket)

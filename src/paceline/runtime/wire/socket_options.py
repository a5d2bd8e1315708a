"""What all sockets between workers have in common: who is at either end, and how a peer that vanished is found out."""

import zmq

from paceline.runtime.wire.keys import KeyPair

HANDSHAKE_MS = 5_000
KEEPALIVE_SECONDS = 10
ZAP_DOMAIN = b"paceline"


def serve_encrypted(socket: "zmq.Socket[bytes]", own: KeyPair) -> None:
    """Let in only those whom the context's gatekeeper knows."""
    socket.curve_server = 1
    socket.zap_domain = ZAP_DOMAIN
    _identify(socket, own)


def connect_encrypted(socket: "zmq.Socket[bytes]", own: KeyPair, server: str) -> None:
    """`server`: the public key that the other end must prove to own."""
    socket.curve_serverkey = server.encode()
    _identify(socket, own)


def watch_peer(socket: "zmq.Socket[bytes]") -> None:
    """No ZMTP heartbeats: a queue that is full looks dead to them, and libzmq then aborts the process (zeromq/libzmq#3937).
    Protocols ping; the kernel finds out about peers that vanished."""
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_SECONDS)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_SECONDS)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def _identify(socket: "zmq.Socket[bytes]", own: KeyPair) -> None:
    socket.curve_publickey = own.public.encode()
    socket.curve_secretkey = own.secret.encode()

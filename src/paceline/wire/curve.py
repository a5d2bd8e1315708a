"""CURVE encryption and client authentication of ZeroMQ sockets, and TCP keep-alive."""

from collections.abc import Set
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from paceline.wire.keys import KeyPair

HANDSHAKE_MS = 5_000
KEEPALIVE_SECONDS = 10
ZAP_DOMAIN = "paceline"


class Authenticator:
    """Accepts the clients of a context whose public key is in `allowed`, and rejects all other clients (ZAP, RFC 27).

    Hazard: create it before a server socket binds. libzmq accepts every client of a context without a ZAP handler.
    """

    def __init__(self, context: "zmq.Context[Any]", allowed: Set[str]) -> None:
        self._allowed = allowed
        self.num_rejected = 0
        self._handler = ThreadAuthenticator(context)
        self._handler.configure_curve_callback(ZAP_DOMAIN, self)
        self._handler.start()

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by pyzmq for every connecting client. `key` is its public key in Z85."""
        is_allowed = key.decode() in self._allowed
        self.num_rejected += not is_allowed
        return is_allowed

    def close(self) -> None:
        self._handler.stop()


def encrypt_server(socket: "zmq.Socket[bytes]", own: KeyPair) -> None:
    """Make `socket` a CURVE server; the context's `Authenticator` decides about its clients."""
    socket.curve_server = 1
    socket.zap_domain = ZAP_DOMAIN.encode()
    _set_keys(socket, own)


def encrypt_client(socket: "zmq.Socket[bytes]", own: KeyPair, server: str) -> None:
    """Make `socket` a CURVE client. `server` is the public key that the server must prove to own."""
    socket.curve_serverkey = server.encode()
    _set_keys(socket, own)


def set_keepalive(socket: "zmq.Socket[bytes]") -> None:
    """TCP keep-alive and a handshake timeout.

    Hazard: no ZMTP heartbeats. With a full queue libzmq takes the peer for dead and aborts the process (zeromq/libzmq#3937).
    """
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_SECONDS)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_SECONDS)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def _set_keys(socket: "zmq.Socket[bytes]", own: KeyPair) -> None:
    socket.curve_publickey = own.public.encode()
    socket.curve_secretkey = own.secret.encode()

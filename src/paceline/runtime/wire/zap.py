"""The door: answers libzmq's question whether a client key may connect (ZAP, RFC 27)."""

import threading
from collections.abc import Callable

import zmq
from zmq.utils import z85

ENDPOINT = "inproc://zeromq.zap.01"
_STOP = b""


class Gatekeeper:
    """Lets in the clients whose public key `is_allowed`. One per context; it must be open before a server socket binds,
    since libzmq lets everybody in where nobody keeps the door.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], is_allowed: Callable[[str], bool]) -> None:
        self._is_allowed = is_allowed
        self.num_refused = 0
        self._door = context.socket(zmq.REP)
        self._door.linger = 0
        self._door.bind(ENDPOINT)
        bell = f"inproc://zap-stop-{id(self)}"
        self._bell = context.socket(zmq.PAIR)
        self._bell.bind(bell)
        self._stop = context.socket(zmq.PAIR)
        self._stop.connect(bell)
        self._thread = threading.Thread(target=self._keep, name="zap", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.send(_STOP)
        self._thread.join()
        self._stop.close(0)

    def _keep(self) -> None:
        poller = zmq.Poller()
        poller.register(self._door, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._bell in ready:
                break
            self._door.send_multipart(self._answer(self._door.recv_multipart()))
        self._door.close(0)
        self._bell.close(0)

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        """version, id, domain, address, identity, mechanism, credentials -> version, id, status, text, user, metadata"""
        version, request_id = frames[:2]
        if len(frames) == 7 and version == b"1.0" and frames[5] == b"CURVE" and len(frames[6]) == 32:
            key = z85.encode(frames[6]).decode()
            if self._is_allowed(key):
                return [version, request_id, b"200", b"OK", key.encode(), b""]
        self.num_refused += 1
        return [version, request_id, b"400", b"this key is not on the list", b"", b""]

"""A courier's connection to one depot: what is asked for, and what comes back."""

import math

import zmq
from zmq.utils.monitor import recv_monitor_message

from paceline.runtime.transfer.answers import decode_answer
from paceline.runtime.transfer.channels.sockets import is_address, is_key, taking_socket
from paceline.runtime.transfer.errors import TransferFailed
from paceline.runtime.transfer.messages import TO_DEPOT, Answer, ToDepot
from paceline.runtime.wire.keys import KeyPair

REFUSED_KEY = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
NOTHING = memoryview(b"")


class Control:
    """It is not made anew when it breaks: a depot that is gone is gone with its parcels."""

    def __init__(self, address: str, own: KeyPair | None, server: str) -> None:
        """Raises TransferFailed for what is no address or no key: it came from elsewhere."""
        if not is_address(address) or (own is not None and not is_key(server)):
            raise TransferFailed(f"the ticket is wrong: {address!r} is no address, or {server!r} no public key")
        self._address = address
        self._socket = taking_socket(address, own, server)
        self._monitor = self._socket.get_monitor_socket(REFUSED_KEY | LOST)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(address)

    def send(self, message: ToDepot) -> None:
        try:
            self._socket.send(TO_DEPOT.encode(message), zmq.DONTWAIT)
        except zmq.Again:  # there is no queue where there is no connection and none to come
            raise self._lost() from None

    def receive(self, seconds: float) -> tuple[Answer, memoryview] | None:
        """An answer and the bytes that came with it, or None when nothing came in time. Raises TransferFailed when the depot
        refuses, is gone, or says what it should not."""
        ready = dict(self._poller.poll(math.ceil(seconds * 1e3)))
        if self._socket not in ready:  # what came before the end is still read
            if self._monitor in ready:
                raise self._lost()
            return None
        frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
        return decode_answer(self._address, frames[0].buffer), frames[1].buffer if len(frames) == 2 else NOTHING

    def is_broken(self) -> bool:
        return bool(self._monitor.poll(0))

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def _lost(self) -> TransferFailed:
        event = recv_monitor_message(self._monitor)["event"] if self._monitor.poll(0) else 0
        if event & REFUSED_KEY:
            return TransferFailed(f"{self._address} does not let this key in")
        return TransferFailed(f"{self._address} is gone")

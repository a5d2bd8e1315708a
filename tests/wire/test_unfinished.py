"""A message of ever more frames does not fill the memory of a worker, and other connections stay."""

import socket
import time
from urllib.parse import urlsplit

import pytest

from paceline.wire import transport
from paceline.wire.draft_messages import TO_DRAFT_WORKER, TO_TARGET, Ping
from paceline.wire.transport import Connection, Listener

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
"""Of ZMTP 3.0 without keys."""
READY = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
FRAME = b"\x03" + (1 << 16).to_bytes(8, "big") + bytes(1 << 16)
"""A long frame that another one follows."""


def _receive(client: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = client.recv(count - len(received))
        assert part, "the connection was closed in its handshake"
        received += part
    return received


def attack(address: str, most: int) -> int:
    """Sends frames of one message until the connection is cut, at most `most` bytes. Returns the bytes."""
    parts, sent = urlsplit(address), 0
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as client:
        client.sendall(GREETING)
        client.sendall(b"\x04" + bytes([len(READY)]) + READY)
        _receive(client, len(GREETING))
        _receive(client, _receive(client, 2)[1])  # frames before the peer is ready would be an error of the protocol
        try:
            while sent < most:
                client.sendall(FRAME)
                sent += len(FRAME)
        except OSError:
            pass
    return sent


def test_a_message_that_does_not_end_cuts_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "UNFINISHED_BYTES", 4 << 20)
    listener = Listener("tcp://127.0.0.1:0", TO_DRAFT_WORKER)
    other = Connection(listener.address, TO_TARGET)
    try:
        assert other.send(Ping(1))
        assert listener.receive(10) is not None
        assert attack(listener.address, 1 << 30) < 1 << 30
        assert listener.num_cut == 1
        assert other.send(Ping(1))
        received = listener.receive(10)
        assert received is not None
        assert received.message == Ping(1)
        assert not other.was_disconnected()
    finally:
        other.close()
        listener.close()


def test_whole_messages_are_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many more bytes than the limit, in messages that the listener takes."""
    monkeypatch.setattr(transport, "UNFINISHED_BYTES", 1 << 16)
    listener = Listener("tcp://127.0.0.1:0", TO_DRAFT_WORKER)
    client = Connection(listener.address, TO_TARGET)
    try:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            assert client.send(Ping(1))
            assert listener.receive(10) is not None
        assert listener.num_cut == 0
        assert not client.was_disconnected()
    finally:
        client.close()
        listener.close()

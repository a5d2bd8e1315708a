"""Clients and servers that violate the protocol lose their own transfer and harm no other."""

import os
import socket
import threading
from contextlib import closing, contextmanager

import msgspec
import pytest
import zmq

from paceline.kernels.cpu.checksums import crc32
from paceline.transfer import client as client_module
from paceline.transfer import nixl as nixl_agent
from paceline.transfer.client import TransferClient
from paceline.transfer.fair_queue import MAX_REQUESTS
from paceline.transfer.nixl import NUM_SLOTS
from paceline.transfer.server import TransferServer
from paceline.transfer.shared_memory import HELLO, SEALS, SEGMENT_BYTES, socket_path
from paceline.transfer.transfer import CHUNK_BYTES, MAX_INFLIGHT_CHUNKS, Transfer, TransferFailed
from paceline.wire.keys import Security, generate_key_pair
from paceline.wire.transfer_messages import (
    TO_CLIENT,
    TO_SERVER,
    ChunkReply,
    ChunkRequest,
    KeepAlive,
    Refused,
    SlotReleased,
    StagingReply,
    StagingRequest,
    TransferHandle,
)
from tests.processes.target_harness import until
from tests.transfer.transfers import Destination, filled, num_descriptors, num_segments, random_parts


@pytest.fixture
def server():
    """A server that must serve the next client after each test."""
    with closing(TransferServer("127.0.0.1", None)) as server:
        yield server
        handle = server.offer(filled(random_parts()))
        for channel in ("memory", "socket"):
            with closing(TransferClient(None, [channel])) as client:
                assert Destination(handle).fetch(client, handle, timeout=30).buffers == random_parts()


@contextmanager
def raw_client(server):
    with zmq.Context() as context, context.socket(zmq.DEALER) as connection:
        connection.linger = 0
        connection.connect(server.addresses["socket"])
        yield connection


def receive(connection):
    assert connection.poll(10_000)
    return TO_CLIENT.decode(connection.recv_multipart()[0])


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xc1 no msgpack"],
        [b"\x91" * 5000],
        [os.urandom(4000)],
        [b"one", b"two", b"three"],
        [msgspec.msgpack.encode([1, b"short id", 0, 0])],
        [msgspec.msgpack.encode([1, bytes(16), 2**31, 0])],
        [msgspec.msgpack.encode([1, bytes(16), 0, -1])],
        [msgspec.msgpack.encode([99])],
        [TO_SERVER.encode(SlotReleased(5))],
    ],
)
def test_an_invalid_message_is_dropped(server, frames):
    with raw_client(server) as connection:
        connection.send_multipart(frames)
        connection.send(TO_SERVER.encode(ChunkRequest(bytes(16), 0, 0)))
        if len(frames[0]) <= 4096:
            assert isinstance(receive(connection), Refused)


def test_a_message_that_is_too_long_ends_the_connection(server):
    with raw_client(server) as connection:
        connection.send(bytes(1 << 20))
        connection.send(TO_SERVER.encode(ChunkRequest(bytes(16), 0, 0)))


@pytest.mark.parametrize(("index", "chunk"), [(5, 0), (2**31 - 1, 0), (0, 1), (2, 3), (4, 2**31 - 1)])
def test_a_part_that_does_not_exist_is_refused(server, index, chunk):
    handle = server.offer(filled(random_parts()))
    with raw_client(server) as connection:
        connection.send(TO_SERVER.encode(ChunkRequest(handle.id, index, chunk)))
        assert receive(connection) == Refused("there is no such part")


def test_too_many_open_requests_are_refused(server):
    handle = server.offer(Transfer([4]))
    with raw_client(server) as connection:
        for _ in range(MAX_REQUESTS + 1):
            connection.send(TO_SERVER.encode(ChunkRequest(handle.id, 0, 0)))
        reply = receive(connection)
        while isinstance(reply, KeepAlive):
            reply = receive(connection)
        assert reply == Refused("too many open requests")


def test_a_client_that_does_not_read_is_dropped(server):
    handle = server.offer(filled(random_parts([CHUNK_BYTES])))
    with raw_client(server) as connection:
        connection.rcvhwm = 1
        for _ in range(40 * MAX_REQUESTS):
            connection.send(TO_SERVER.encode(ChunkRequest(handle.id, 0, 0)))
        with closing(TransferClient(None)) as client:
            assert Destination(handle).fetch(client, handle, timeout=30).buffers == random_parts([CHUNK_BYTES])


def test_a_socket_client_has_no_slots(server):
    handle = server.offer(filled(random_parts()))
    with raw_client(server) as connection:
        connection.send(TO_SERVER.encode(ChunkRequest(handle.id, 1, 0, slot=3)))
        assert receive(connection) == Refused("there is no such slot")


def test_nixl_on_a_server_without_it_is_refused():
    with closing(TransferServer("127.0.0.1", None, ["socket"])) as server, raw_client(server) as connection:
        connection.send(TO_SERVER.encode(StagingRequest()))
        assert receive(connection) == Refused("NIXL is not enabled on this server")


def test_a_nixl_client_that_does_not_read_gets_a_bounded_number_of_slots():
    if not nixl_agent.is_installed():
        pytest.skip("NIXL is not installed: pip install 'paceline[transfer]'")
    with closing(TransferServer("127.0.0.1", None, ["nixl"])) as server, raw_client(server) as connection:
        for _ in range(NUM_SLOTS):
            connection.send(TO_SERVER.encode(StagingRequest()))
        replies = [receive(connection) for _ in range(NUM_SLOTS)]
        assert sum(isinstance(one, StagingReply) for one in replies) == MAX_INFLIGHT_CHUNKS
        assert Refused("the staging buffer is full: too many clients read from it") in replies
        handle = server.offer(filled(random_parts()))
        # This request waits for a slot and must not delay other clients
        connection.send(TO_SERVER.encode(ChunkRequest(handle.id, 1, 0, slot=0)))
        with closing(TransferClient(None, ["nixl"])) as client:
            assert Destination(handle).fetch(client, handle, timeout=30).buffers == random_parts()


def create_segment(size=SEGMENT_BYTES, seals=SEALS):
    import fcntl

    descriptor = os.memfd_create("paceline-segment", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize("what", ["nothing", "a pipe", "a file", "unsealed", "too small", "too large", "wrong hello"])
def test_an_invalid_segment_is_refused(server, what, tmp_path):
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", SEGMENT_BYTES)  # sparse, of the right size
    num_before = num_segments()
    descriptors = {
        "nothing": list,
        "a pipe": lambda: list(os.pipe())[1:],
        "a file": lambda: [os.open(tmp_path / "file", os.O_RDWR)],
        "unsealed": lambda: [create_segment(seals=0)],
        "too small": lambda: [create_segment(CHUNK_BYTES)],
        "too large": lambda: [create_segment(2 * SEGMENT_BYTES)],
        "wrong hello": lambda: [create_segment()],
    }[what]()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(10)
            connection.connect(socket_path(server.addresses["memory"]))
            socket.send_fds(connection, [b"what" if what == "wrong hello" else HELLO], descriptors)
            assert connection.recv(10) == b""
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    assert num_segments() == num_before


def test_a_slot_outside_the_segment_is_refused(server):
    handle = server.offer(filled(random_parts()))
    descriptor = create_segment()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(10)
        connection.connect(socket_path(server.addresses["memory"]))
        socket.send_fds(connection, [HELLO], [descriptor])
        os.close(descriptor)
        assert connection.recv(10) == HELLO
        for slot in (MAX_INFLIGHT_CHUNKS, 2**16 - 1):
            connection.send(TO_SERVER.encode(ChunkRequest(handle.id, 1, 0, slot)))
            assert TO_CLIENT.decode(connection.recv(4096)) == Refused("there is no such slot")
        connection.send(b"\xc1")
        connection.send(TO_SERVER.encode(ChunkRequest(handle.id, 1, 0, 7)))
        assert TO_CLIENT.decode(connection.recv(4096)) == ChunkReply(1, 0, crc32(memoryview(random_parts()[1])))
        connection.send(
            TO_SERVER.encode(ChunkRequest(handle.id, 1, 0, -1))
        )  # a local client cannot use the socket channel
        assert connection.recv(4096) == b""


def test_clients_that_only_connect_leak_nothing(server):
    before = num_descriptors()
    for _ in range(50):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(socket_path(server.addresses["memory"]))
    handle = server.offer(filled(random_parts()))
    with closing(TransferClient(None, ["memory"])) as client:
        Destination(handle).fetch(client, handle)
    assert num_descriptors() <= before + 8


@contextmanager
def fake_server(respond):
    """A server that sends the frames of `respond(requests)` after every request."""
    requests = []
    with zmq.Context() as context, context.socket(zmq.ROUTER) as connection:
        connection.linger = 0
        port = connection.bind_to_random_port("tcp://127.0.0.1")

        def run():
            while connection.poll(5000):
                peer, data = connection.recv_multipart()
                if data == b"stop":
                    return
                requests.append(TO_SERVER.decode(data))
                for frames in respond(requests):
                    connection.send_multipart([peer, *frames])

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield TransferHandle(bytes(16), {"socket": f"tcp://127.0.0.1:{port}"}, [20 * CHUNK_BYTES]), requests
        finally:
            with context.socket(zmq.DEALER) as stop:
                stop.connect(f"tcp://127.0.0.1:{port}")
                stop.send(b"stop")
                thread.join(10)


def chunk_reply(index=0, chunk=0, data=bytes(CHUNK_BYTES), crc=None):
    return [TO_CLIENT.encode(ChunkReply(index, chunk, crc32(memoryview(data)) if crc is None else crc)), data]


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (chunk_reply(crc=1), "corrupt"),
        (chunk_reply(data=bytes(CHUNK_BYTES - 1)), "corrupt"),
        (chunk_reply(data=bytes(CHUNK_BYTES + 1)), "corrupt"),
        (chunk_reply(data=b""), "corrupt"),
        (chunk_reply()[:1], "corrupt"),
        (chunk_reply(index=1), "not requested"),
        (chunk_reply(chunk=19), "not requested"),
        ([b"\xc1"], "does not speak"),
        ([os.urandom(100)], "does not speak"),
        ([TO_CLIENT.encode(StagingReply(b"", 0, 0))], "not requested"),
        ([TO_CLIENT.encode(Refused("because"))], "because"),
        ([TO_CLIENT.encode(ChunkReply(0, 0, 0)), b"", b""], "corrupt"),
    ],
)
def test_an_invalid_reply_fails_the_fetch(frames, message):
    with (
        fake_server(lambda requests: [frames] if len(requests) == 1 else []) as (handle, _),
        closing(TransferClient(None, ["socket"])) as client,
        pytest.raises(TransferFailed, match=message),
    ):
        Destination(handle).fetch(client, handle, timeout=30)


def test_a_chunk_sent_twice_fails_the_fetch():
    with (
        fake_server(lambda requests: [chunk_reply(), chunk_reply()] if len(requests) == 1 else []) as (handle, _),
        closing(TransferClient(None, ["socket"])) as client,
        pytest.raises(TransferFailed, match="not requested"),
    ):
        Destination(handle).fetch(client, handle, timeout=30)


def test_a_silent_server_fails_the_fetch(monkeypatch):
    monkeypatch.setattr(client_module, "SILENCE_SECONDS", 0.3)
    with fake_server(lambda requests: []) as (handle, requests):
        with closing(TransferClient(None, ["socket"])) as client, pytest.raises(TransferFailed, match="sent nothing"):
            Destination(handle).fetch(client, handle, timeout=30)
        until(lambda: len(requests) == MAX_INFLIGHT_CHUNKS)  # the limit of chunks in flight


@pytest.mark.parametrize(
    "address", ["", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "tcp://[::", "ipc:///tmp/x", "x" * 256]
)
@pytest.mark.parametrize("channel", ["memory", "nixl", "socket"])
def test_a_handle_with_an_invalid_address_fails(address, channel):
    handle = TransferHandle(bytes(16), {channel: address}, [1])
    with closing(TransferClient(None)) as client, pytest.raises(TransferFailed):
        Destination(handle).fetch(client, handle, timeout=5)


@pytest.mark.parametrize("key", ["x", "x" * 39, "\x7f" * 40, "é" * 40])
def test_a_handle_with_an_invalid_key_fails(key):
    handle = TransferHandle(bytes(16), {"socket": "tcp://127.0.0.1:9"}, [1], key)
    with (
        closing(TransferClient(Security(generate_key_pair()))) as client,
        pytest.raises(TransferFailed, match="no public key"),
    ):
        Destination(handle).fetch(client, handle, timeout=5)

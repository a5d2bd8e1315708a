import threading
import time
from contextlib import closing

import pytest
import zmq

from paceline.core.errors import InvalidConfig
from paceline.wire.codec import MalformedMessage
from paceline.wire.draft_messages import TO_DRAFT_WORKER, TO_TARGET, Goodbye, Ping, Pong
from paceline.wire.keys import Security, generate_key_pair
from paceline.wire.transport import QUEUE_MESSAGES, AddressInUse, Connection, Listener, is_local, wait_any
from tests.processes.pools import securities
from tests.processes.target_harness import until

HERE = "tcp://127.0.0.1:0"


def listen(security=None, address=HERE):
    return closing(Listener(address, TO_DRAFT_WORKER, security))


def connect(listener, security=None):
    return closing(Connection(listener.address, TO_TARGET, security))


def exchange(listener, connection, nonce=3, seconds=10.0):
    assert connection.send(Ping(nonce))
    received = listener.receive(seconds)
    assert received is not None
    assert received.message == Ping(nonce)
    assert listener.send(received.peer, Pong(1, nonce))
    assert connection.receive(seconds) == Pong(1, nonce)
    return received


def test_request_and_reply():
    with listen() as listener, connect(listener) as connection:
        exchange(listener, connection)
        assert listener.traffic.received == connection.traffic.received == 1
        assert listener.traffic.bytes_received == connection.traffic.bytes_sent > 0
        assert listener.receive(0.0) is None


def test_connection_before_the_listener_exists():
    with listen() as gone:
        address = gone.address
    with closing(Connection(address, TO_TARGET)) as connection:
        assert connection.send(Ping(1))
        with listen(address=address) as listener:
            received = listener.receive(10.0)
            assert received is not None
            assert received.message == Ping(1)


def test_curve_accepts_allowed_clients():
    server, client = securities()
    with listen(server) as listener, connect(listener, client) as connection:
        exchange(listener, connection)


@pytest.mark.parametrize("kind", ["unknown client key", "no key", "wrong server key"])
def test_curve_rejects_other_clients(kind):
    server, client = securities()
    clients = {
        "unknown client key": Security(generate_key_pair(), server=server.own.public),
        "no key": None,
        "wrong server key": Security(client.own, server=generate_key_pair().public),
    }
    with listen(server) as listener, connect(listener, clients[kind]) as connection, connect(listener, client) as known:
        connection.send(Ping(66))
        exchange(listener, known)
        until(lambda: listener.num_rejected == (kind == "unknown client key"))
        assert listener.receive(0.3) is None
        assert listener.num_rejected == (kind == "unknown client key")


def test_without_keys_only_loopback_addresses():
    for address in ("tcp://0.0.0.0:0", "tcp://*:0", "tcp://example.org:5000"):
        with pytest.raises(InvalidConfig, match="paceline keys"):
            Listener(address, TO_DRAFT_WORKER)
    assert is_local("tcp://127.0.0.1:1")
    assert is_local("tcp://localhost:1")
    assert is_local("tcp://[::1]:1")
    assert is_local("ipc:///tmp/x")
    assert not is_local("tcp://10.0.0.1:1")


def test_client_needs_the_public_key_of_the_server():
    with pytest.raises(InvalidConfig, match="public key"):
        Connection("tcp://127.0.0.1:1", TO_TARGET, Security(generate_key_pair()))


def test_address_in_use():
    with listen() as listener, pytest.raises(AddressInUse, match="another port"):
        Listener(listener.address, TO_DRAFT_WORKER)


@pytest.mark.parametrize("frames", [[b"\xc1"], [b""], [b"a", b"b"], [TO_DRAFT_WORKER.encode(Pong(1, 1))]])
def test_malformed_message_is_counted_and_the_next_one_received(frames):
    with listen() as listener, connect(listener) as connection:
        connection.socket.send_multipart(frames)
        received = listener.receive(10.0)
        assert received is not None
        assert isinstance(received.message, MalformedMessage)
        assert listener.traffic.malformed == 1
        exchange(listener, connection)


def test_message_over_the_size_limit_ends_its_connection_only():
    with listen() as listener, connect(listener) as connection, connect(listener) as other:
        connection.socket.send(b"\0" * (9 << 20))
        exchange(listener, other)
        assert listener.traffic.malformed == 0


def test_sending_never_blocks_and_counts_dropped_messages():
    with listen() as gone:
        address = gone.address
    with closing(Connection(address, TO_TARGET)) as connection:
        started = time.monotonic()
        sent = sum(connection.send(Ping(i)) for i in range(3 * QUEUE_MESSAGES))
        assert time.monotonic() - started < 10.0
        assert sent < 3 * QUEUE_MESSAGES
        assert connection.traffic.dropped == 3 * QUEUE_MESSAGES - sent
    with listen() as listener:
        assert not listener.send(b"unknown", Goodbye())
        assert listener.traffic.dropped == 1


def test_other_threads_post_and_wake():
    with listen() as listener, connect(listener) as connection:
        peer = exchange(listener, connection).peer
        thread = threading.Thread(target=listener.post, args=(peer, Pong(1, 77)))
        thread.start()
        started = time.monotonic()
        assert listener.receive(30.0) is None, "woken without a message"
        assert time.monotonic() - started < 20.0
        thread.join()
        assert connection.receive(10.0) == Pong(1, 77)


def test_wait_any():
    with listen() as listener, connect(listener) as one, connect(listener) as two:
        exchange(listener, one)
        peer = exchange(listener, two).peer
        assert wait_any([one, two], 0.0) == []
        listener.send(peer, Pong(1, 1))
        assert wait_any([one, two], 10.0) == [two]


def test_empty_allow_list_rejects_every_client():
    """libzmq accepts every client if no ZAP handler is installed."""
    server, client = securities()
    with listen(Security(server.own)) as listener, connect(listener, client) as connection:
        connection.send(Ping(1))
        until(lambda: listener.num_rejected >= 1)
        assert listener.receive(0.1) is None
    assert zmq.has("curve")

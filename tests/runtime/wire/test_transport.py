import threading
import time
from contextlib import closing

import pytest
import zmq

from paceline.core.errors import InvalidConfig
from paceline.runtime.wire.codec import MalformedMessage
from paceline.runtime.wire.keys import Security, generate_key_pair
from paceline.runtime.wire.messages import TO_DRAFT_WORKER, TO_TARGET, Goodbye, Ping, Pong
from paceline.runtime.wire.transport import QUEUE_MESSAGES, AddressInUse, Connection, Listener, is_local, wait_any
from tests.runtime.pools import securities

HERE = "tcp://127.0.0.1:0"


def listen(security=None, address=HERE):
    return closing(Listener(address, TO_DRAFT_WORKER, security))


def connect(listener, security=None):
    return closing(Connection(listener.address, TO_TARGET, security))


def exchange(listener, line, nonce=3, seconds=10.0):
    assert line.send(Ping(nonce))
    received = listener.receive(seconds)
    assert received is not None
    assert received.message == Ping(nonce)
    assert listener.send(received.peer, Pong(1, nonce))
    assert line.receive(seconds) == Pong(1, nonce)
    return received


def test_there_and_back():
    with listen() as listener, connect(listener) as line:
        assert exchange(listener, line).user == ""
        assert listener.traffic.received == line.traffic.received == 1
        assert listener.traffic.bytes_received == line.traffic.bytes_sent > 0
        assert listener.receive(0.0) is None


def test_a_line_may_be_laid_before_there_is_anybody():
    with listen() as gone:
        address = gone.address
    with closing(Connection(address, TO_TARGET)) as line:
        assert line.send(Ping(1))
        with listen(address=address) as listener:
            received = listener.receive(10.0)
            assert received is not None
            assert received.message == Ping(1)


def test_curve_lets_in_the_list_and_tells_who_it_is():
    server, client = securities()
    with listen(server) as listener, connect(listener, client) as line:
        assert exchange(listener, line).user == client.own.public


@pytest.mark.parametrize("kind", ["a stranger with the server's key", "no key at all", "the wrong server key"])
def test_curve_lets_nobody_else_in(kind):
    server, client = securities()
    strangers = {
        "a stranger with the server's key": Security(generate_key_pair(), server=server.own.public),
        "no key at all": None,
        "the wrong server key": Security(client.own, server=generate_key_pair().public),
    }
    with listen(server) as listener, connect(listener, strangers[kind]) as line, connect(listener, client) as known:
        line.send(Ping(66))
        exchange(listener, known)
        assert listener.receive(0.3) is None
        assert listener.num_rejected == (kind == "a stranger with the server's key")


def test_without_keys_only_this_machine():
    for address in ("tcp://0.0.0.0:0", "tcp://*:0", "tcp://example.org:5000"):
        with pytest.raises(InvalidConfig, match="paceline keys"):
            Listener(address, TO_DRAFT_WORKER)
    assert is_local("tcp://127.0.0.1:1")
    assert is_local("tcp://localhost:1")
    assert is_local("tcp://[::1]:1")
    assert is_local("ipc:///tmp/x")
    assert not is_local("tcp://10.0.0.1:1")


def test_a_client_must_know_whom_it_talks_to():
    with pytest.raises(InvalidConfig, match="public key"):
        Connection("tcp://127.0.0.1:1", TO_TARGET, Security(generate_key_pair()))


def test_an_address_is_taken_once():
    with listen() as listener, pytest.raises(AddressInUse, match="another port"):
        Listener(listener.address, TO_DRAFT_WORKER)


@pytest.mark.parametrize("frames", [[b"\xc1"], [b""], [b"a", b"b"], [TO_DRAFT_WORKER.encode(Pong(1, 1))]])
def test_what_is_no_message_is_counted_and_the_next_one_heard(frames):
    with listen() as listener, connect(listener) as line:
        line.socket.send_multipart(frames)
        received = listener.receive(10.0)
        assert received is not None
        assert isinstance(received.message, MalformedMessage)
        assert listener.traffic.malformed == 1
        exchange(listener, line)


def test_a_message_beyond_the_limit_ends_the_connection_not_the_listener():
    with listen() as listener, connect(listener) as line, connect(listener) as other:
        line.socket.send(b"\0" * (9 << 20))
        exchange(listener, other)
        assert listener.traffic.malformed == 0


def test_sending_never_blocks_and_what_does_not_fit_is_refused():
    with listen() as gone:
        address = gone.address
    with closing(Connection(address, TO_TARGET)) as line:
        started = time.monotonic()
        sent = sum(line.send(Ping(i)) for i in range(3 * QUEUE_MESSAGES))
        assert time.monotonic() - started < 10.0
        assert sent < 3 * QUEUE_MESSAGES
        assert line.traffic.refused == 3 * QUEUE_MESSAGES - sent
    with listen() as listener:
        assert not listener.send(b"nobody", Goodbye())
        assert listener.traffic.refused == 1


def test_other_threads_post_and_wake():
    with listen() as listener, connect(listener) as line:
        peer = exchange(listener, line).peer
        thread = threading.Thread(target=listener.post, args=(peer, Pong(1, 77)))
        thread.start()
        started = time.monotonic()
        assert listener.receive(30.0) is None, "woken, with nothing to receive"
        assert time.monotonic() - started < 20.0
        thread.join()
        assert line.receive(10.0) == Pong(1, 77)


def test_waiting_for_any_of_several():
    with listen() as listener, connect(listener) as one, connect(listener) as two:
        exchange(listener, one)
        peer = exchange(listener, two).peer
        assert wait_any([one, two], 0.0) == []
        listener.send(peer, Pong(1, 1))
        assert wait_any([one, two], 10.0) == [two]


def test_the_door_is_kept_from_the_start():
    """libzmq lets everybody in where no handler is bound: a listener with an empty list lets in nobody."""
    server, client = securities()
    with listen(Security(server.own)) as listener, connect(listener, client) as line:
        line.send(Ping(1))
        assert listener.receive(0.5) is None
        assert listener.num_rejected >= 1
    assert zmq.has("curve")

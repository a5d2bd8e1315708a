"""The guarantees of every channel, between a server and clients of one process."""

import threading
import time
from contextlib import closing
from operator import le

import pytest

from paceline.core.errors import InvalidConfig
from paceline.transfer import client as client_module
from paceline.transfer import nixl as nixl_agent
from paceline.transfer import server as serve_loop
from paceline.transfer.client import TransferClient
from paceline.transfer.pool import CHANNELS
from paceline.transfer.server import TransferServer
from paceline.transfer.transfer import CHUNK_BYTES, Transfer, TransferCancelled, TransferFailed
from paceline.wire.keys import Security, generate_key_pair
from paceline.wire.transfer_messages import TransferHandle
from tests.transfer.transfers import Destination, filled, num_descriptors, num_segments, random_parts


@pytest.fixture
def server():
    with closing(TransferServer("127.0.0.1", None)) as server:
        yield server


@pytest.fixture(params=CHANNELS)
def client(request):
    """A client with this channel only."""
    if request.param == "nixl" and not nixl_agent.is_installed():
        pytest.skip("NIXL is not installed: pip install 'paceline[transfer]'")
    with closing(TransferClient(None, [request.param])) as client:
        yield client


def test_all_parts_arrive(server, client):
    data = random_parts()
    handle = server.offer(filled(data))
    for _ in range(3):
        destination = Destination(handle).fetch(client, handle)
        assert destination.order == [0, 1, 2, 3, 4]
        assert destination.buffers == data


def test_parts_arrive_in_the_requested_order(server, client):
    data = random_parts()
    handle = server.offer(filled(data))
    destination = Destination(handle).fetch(client, handle, [4, 1])
    assert destination.order == [4, 1]
    assert [bytes(buffer) == part for buffer, part in zip(destination.buffers, data, strict=True)] == [
        True,
        True,
        False,
        False,
        True,
    ]
    assert Destination(handle).fetch(client, handle, []).order == []
    for wrong in ([5], [-1], [1, 1]):
        with pytest.raises(ValueError, match="distinct parts"):
            Destination(handle).fetch(client, handle, wrong)


def test_parts_arrive_as_they_become_ready(server, client):
    data = random_parts((100, CHUNK_BYTES + 1, 7))
    transfer = Transfer([len(part) for part in data])
    handle = server.offer(transfer)
    destination = Destination(handle)

    def on_part(index):
        destination.order.append(index)
        if index > 0:  # the next part is filled only after this one arrived
            transfer.fill(index - 1, memoryview(data[index - 1]))

    transfer.fill(2, memoryview(data[2]))
    client.fetch(handle, range(3), lambda i: memoryview(destination.buffers[i]), on_part, timeout=30)
    assert destination.order == [2, 1, 0]
    assert destination.buffers == data


def test_concurrent_fetches_from_many_threads(server, client):
    data = random_parts()
    handle = server.offer(filled(data))
    results = [Destination(handle) for _ in range(6)]
    threads = [threading.Thread(target=one.fetch, args=(client, handle)) for one in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(one.buffers == data for one in results)


def test_parts_of_one_transfer_come_from_two_servers(client):
    data = random_parts()
    with closing(TransferServer("127.0.0.1", None)) as first, closing(TransferServer("127.0.0.1", None)) as second:
        transfer = filled(data)
        destination = Destination(handle := first.offer(transfer))
        destination.fetch(client, handle, [0, 2, 4]).fetch(client, second.offer(transfer), [1, 3])
        assert destination.buffers == data


def test_a_withdrawn_transfer_is_refused(server, client):
    handle, other = server.offer(filled(random_parts())), server.offer(filled(random_parts()))
    server.withdraw(handle)
    server.withdraw(handle)
    with pytest.raises(TransferFailed, match="withdrawn"):
        Destination(handle).fetch(client, handle)
    assert Destination(other).fetch(client, other).buffers == random_parts()


@pytest.mark.parametrize("end", ["withdraw", "abort", "close"])
def test_a_waiting_fetch_fails_when_the_transfer_ends(client, end):
    with closing(TransferServer("127.0.0.1", None)) as server:
        transfer = Transfer([4, 4])
        transfer.fill(0, memoryview(b"here"))
        handle = server.offer(transfer)
        destination = Destination(handle)

        def on_part(index):
            {
                "withdraw": lambda: server.withdraw(handle),
                "abort": lambda: transfer.abort("out of memory"),
                "close": server.close,
            }[end]()

        message = {"withdraw": "withdrawn", "abort": "out of memory", "close": "gone"}[end]
        with pytest.raises(TransferFailed, match=message):
            client.fetch(handle, [0, 1], lambda i: memoryview(destination.buffers[i]), on_part, timeout=30)


def test_a_cancelled_fetch_ends(server, client):
    handle = server.offer(Transfer([4]))
    cancelled = threading.Event()
    timer = threading.Timer(0.1, cancelled.set)
    timer.start()
    with pytest.raises(TransferCancelled):
        Destination(handle).fetch(client, handle, cancelled=cancelled, timeout=30)
    cancelled.set()
    full = server.offer(filled(random_parts()))
    with pytest.raises(TransferCancelled):
        Destination(full).fetch(client, full, cancelled=cancelled)
    assert Destination(full).fetch(client, full).buffers == random_parts()


def test_a_fetch_times_out(server, client):
    handle = server.offer(Transfer([4]))
    with pytest.raises(TransferFailed, match=r"not arrived after 0\.1 s"):
        Destination(handle).fetch(client, handle, timeout=0.1)


@pytest.mark.parametrize("client", ["socket"], indirect=True)
def test_keep_alives_prevent_the_silence_timeout(server, client, monkeypatch):
    """The part becomes ready after the silence timeout, which is the time of very many keep-alives."""
    monkeypatch.setattr(client_module, "SILENCE_SECONDS", 1.5)
    monkeypatch.setattr(serve_loop, "KEEP_ALIVE_SECONDS", 0.01)
    transfer = Transfer([4])
    handle = server.offer(transfer)
    timer = threading.Timer(2.0, transfer.fill, (0, memoryview(b"late")))
    timer.start()
    assert Destination(handle).fetch(client, handle, timeout=30).buffers == [b"late"]
    timer.join()


def test_changed_bytes_fail_the_checksum(server, client):
    data = [bytearray(part) for part in random_parts()]
    handle = server.offer(filled(data))
    data[2][CHUNK_BYTES + 17] ^= 1
    destination = Destination(handle)
    with pytest.raises(TransferFailed, match="part 2 is corrupt"):
        destination.fetch(client, handle)
    assert 2 not in destination.order


def test_a_forged_handle_is_refused(server, client):
    handle = server.offer(filled(random_parts()))
    forged = TransferHandle(bytes(16), handle.addresses, handle.sizes)
    with pytest.raises(TransferFailed, match="not here"):
        Destination(forged).fetch(client, forged)
    longer = TransferHandle(handle.id, handle.addresses, [*handle.sizes, 4])
    with pytest.raises(TransferFailed, match="no such part"):
        Destination(longer).fetch(client, longer, [5])
    larger = TransferHandle(handle.id, handle.addresses, [4 * CHUNK_BYTES] * 5)
    with pytest.raises(TransferFailed, match=r"corrupt|no such part"):
        Destination(larger).fetch(client, larger, [1])


def test_an_unsuitable_buffer_ends_the_fetch(server, client):
    handle = server.offer(filled(random_parts()))
    for buffer in (memoryview(bytes(5)), memoryview(bytearray(4)), memoryview(bytearray(10))[::2]):
        with pytest.raises(ValueError, match="writable"):
            client.fetch(handle, [1], lambda i, buffer=buffer: buffer, lambda i: None)
    assert Destination(handle).fetch(client, handle).buffers == random_parts()


def test_exceptions_of_callbacks_propagate(server, client):
    handle = server.offer(filled(random_parts()))

    def on_part(index):
        raise KeyError(index)

    with pytest.raises(KeyError):
        client.fetch(handle, [1], lambda i: memoryview(bytearray(5)), on_part)


def test_a_closed_server_fails_the_fetch_at_once(client):
    with closing(TransferServer("127.0.0.1", None)) as server:
        handle = server.offer(filled(random_parts()))
    started = time.monotonic()
    with pytest.raises(TransferFailed, match=r"gone|no such server"):
        Destination(handle).fetch(client, handle)
    assert time.monotonic() - started < 5


def test_without_keys_only_loopback_is_allowed():
    with pytest.raises(InvalidConfig, match="paceline keys"):
        TransferServer("0.0.0.0", None)


@pytest.mark.parametrize("channel", ["memory", "socket"])
def test_own_and_allowed_keys_are_accepted(channel):
    """Workers of one role share a key; other keys may be allowed."""
    own, other = generate_key_pair(), generate_key_pair()
    with closing(TransferServer("127.0.0.1", Security(own, allowed=frozenset([other.public])))) as server:
        handle = server.offer(filled(random_parts()))
        for pair in (own, other):
            with closing(TransferClient(Security(pair), [channel])) as client:
                assert Destination(handle).fetch(client, handle).buffers == random_parts()
        with closing(TransferClient(None, [channel])) as client, pytest.raises(TransferFailed, match="keys to all"):
            Destination(handle).fetch(client, handle)


def test_a_key_that_is_not_allowed_is_refused_even_with_a_handle():
    own, unknown = generate_key_pair(), generate_key_pair()
    with closing(TransferServer("127.0.0.1", Security(own))) as server:
        handle = server.offer(filled(random_parts()))
        with (
            closing(TransferClient(Security(unknown), ["socket"])) as client,
            pytest.raises(TransferFailed, match="key"),
        ):
            Destination(handle).fetch(client, handle)
        other = TransferHandle(handle.id, handle.addresses, handle.sizes, unknown.public)
        with closing(TransferClient(Security(own), ["socket"])) as client, pytest.raises(TransferFailed):
            Destination(other).fetch(client, other, timeout=2)


def test_a_client_with_keys_refuses_an_unencrypted_server(server):
    handle = server.offer(filled(random_parts()))
    with (
        closing(TransferClient(Security(generate_key_pair()))) as client,
        pytest.raises(TransferFailed, match="keys to all"),
    ):
        Destination(handle).fetch(client, handle)


def test_a_small_fetch_does_not_wait_for_a_large_one(server, client):
    """A second client completes its fetch while the first has as many chunks in flight as allowed."""
    large, small = server.offer(filled(random_parts([CHUNK_BYTES] * 20))), server.offer(filled(random_parts([100])))
    served = []

    def on_part(index):
        if index == 0:
            with closing(TransferClient(None)) as other:
                served.append(Destination(small).fetch(other, small, timeout=10).buffers)

    buffers = [bytearray(CHUNK_BYTES) for _ in range(20)]
    client.fetch(large, range(20), lambda i: memoryview(buffers[i]), on_part)
    assert served == [random_parts([100])]
    assert buffers == random_parts([CHUNK_BYTES] * 20)


def held_resources():
    return num_descriptors(), num_segments(), threading.active_count()


@pytest.mark.parametrize("channel", CHANNELS)
def test_failed_fetches_and_closed_ends_leak_nothing(channel):
    """No descriptor, segment or thread is left after failed fetches and after either side is closed."""
    if channel == "nixl" and not nixl_agent.is_installed():
        pytest.skip("NIXL is not installed: pip install 'paceline[transfer]'")

    def use(num_rounds):
        with closing(TransferClient(None, [channel])) as client, closing(TransferServer("127.0.0.1", None)) as server:
            handle, unfilled = server.offer(filled(random_parts())), server.offer(Transfer([4]))
            for _ in range(num_rounds):
                Destination(handle).fetch(client, handle)
                with pytest.raises(TransferFailed):
                    Destination(unfilled).fetch(client, unfilled, timeout=0.01)

    use(1)
    before = held_resources()
    use(5)
    deadline = time.monotonic() + 10
    while (
        not all(map(le, held_resources(), before)) and time.monotonic() < deadline
    ):  # ZeroMQ closes sockets in the background
        time.sleep(0.02)
    assert all(map(le, held_resources(), before))


def test_channels_to_closed_servers_are_not_kept(client):
    for _ in range(4):
        with closing(TransferServer("127.0.0.1", None)) as server:
            handle = server.offer(filled(random_parts()))
            Destination(handle).fetch(client, handle)
    with closing(TransferServer("127.0.0.1", None)) as server:
        handle = server.offer(filled(random_parts()))
        deadline = time.monotonic() + 10
        while client.num_idle_channels != 1 and time.monotonic() < deadline:  # noticed after a moment
            Destination(handle).fetch(client, handle)
        assert client.num_idle_channels == 1
        assert Destination(handle).fetch(client, handle).buffers == random_parts()

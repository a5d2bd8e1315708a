"""Peers that do not keep to the rules cost themselves their transfer, and others nothing."""

import os
import socket
import threading
from contextlib import closing, contextmanager

import msgspec
import pytest
import zmq

from paceline.runtime.transfer import fetch as fetch_module
from paceline.runtime.transfer.channels import nixl_agent
from paceline.runtime.transfer.channels.staging_buffer import NUM_SLOTS
from paceline.runtime.transfer.channels.windows import HERE, SEALS, WINDOW_BYTES, path_of
from paceline.runtime.transfer.client import Courier
from paceline.runtime.transfer.errors import TransferFailed
from paceline.runtime.transfer.fair_queue import MAX_WANTS
from paceline.runtime.transfer.handle import Ticket
from paceline.runtime.transfer.messages import TO_COURIER, TO_DEPOT, Meet, Met, Patience, Piece, Refused, Want
from paceline.runtime.transfer.messages import Taken as TakenSlot
from paceline.runtime.transfer.pieces import PIECE_BYTES, WINDOW_PIECES, checksum
from paceline.runtime.transfer.server import Depot
from paceline.runtime.transfer.transfer import Parcel
from paceline.runtime.wire.keys import Security, generate
from tests.runtime.transfer.parcels import Taken, filled, num_descriptors, num_windows, parts


@pytest.fixture
def depot():
    """Whatever was done to it, it serves the next taker."""
    with closing(Depot("127.0.0.1", None)) as depot:
        yield depot
        ticket = depot.offer(filled(parts()))
        for kind in ("memory", "socket"):
            with closing(Courier(None, [kind])) as courier:
                assert Taken(ticket).fetch(courier, ticket, timeout=30).places == parts()


@contextmanager
def raw(depot):
    with zmq.Context() as context, context.socket(zmq.DEALER) as line:
        line.linger = 0
        line.connect(depot.addresses["socket"])
        yield line


def answer(line):
    assert line.poll(10_000)
    return TO_COURIER.decode(line.recv_multipart()[0])


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
        [TO_DEPOT.encode(TakenSlot(5))],
    ],
)
def test_what_is_no_message_is_dropped(depot, frames):
    with raw(depot) as line:
        line.send_multipart(frames)
        line.send(TO_DEPOT.encode(Want(bytes(16), 0, 0)))
        if len(frames[0]) <= 4096:
            assert isinstance(answer(line), Refused)


def test_what_is_too_long_ends_the_connection(depot):
    with raw(depot) as line:
        line.send(bytes(1 << 20))
        line.send(TO_DEPOT.encode(Want(bytes(16), 0, 0)))


@pytest.mark.parametrize(("index", "piece"), [(5, 0), (2**31 - 1, 0), (0, 1), (2, 3), (4, 2**31 - 1)])
def test_there_is_nothing_outside_a_parcel(depot, index, piece):
    ticket = depot.offer(filled(parts()))
    with raw(depot) as line:
        line.send(TO_DEPOT.encode(Want(ticket.id, index, piece)))
        assert answer(line) == Refused("there is no such part")


def test_who_wants_too_much_at_once_is_refused(depot):
    ticket = depot.offer(Parcel([4]))
    with raw(depot) as line:
        for _ in range(MAX_WANTS + 1):
            line.send(TO_DEPOT.encode(Want(ticket.id, 0, 0)))
        heard = answer(line)
        while isinstance(heard, Patience):
            heard = answer(line)
        assert heard == Refused("too much is wanted at once")


def test_who_asks_and_does_not_read_is_dropped(depot):
    ticket = depot.offer(filled(parts([PIECE_BYTES])))
    with raw(depot) as line:
        line.rcvhwm = 1
        for _ in range(40 * MAX_WANTS):
            line.send(TO_DEPOT.encode(Want(ticket.id, 0, 0)))
        with closing(Courier(None)) as courier:
            assert Taken(ticket).fetch(courier, ticket, timeout=30).places == parts([PIECE_BYTES])


def test_slots_of_windows_and_shelves_that_are_not_there(depot):
    ticket = depot.offer(filled(parts()))
    with raw(depot) as line:
        line.send(TO_DEPOT.encode(Want(ticket.id, 1, 0, slot=3)))
        assert answer(line) == Refused("there is no such place")


def test_nixl_where_it_is_not_offered():
    with closing(Depot("127.0.0.1", None, ["socket"])) as depot, raw(depot) as line:
        line.send(TO_DEPOT.encode(Meet()))
        assert answer(line) == Refused("NIXL is not offered here")


def test_who_meets_and_does_not_read_takes_no_more_than_its_share():
    """Of the shelf that NIXL takers read from."""
    if not nixl_agent.is_installed():
        pytest.skip("NIXL is not installed: pip install 'paceline[transfer]'")
    with closing(Depot("127.0.0.1", None, ["nixl"])) as depot, raw(depot) as line:
        for _ in range(NUM_SLOTS):
            line.send(TO_DEPOT.encode(Meet()))
        met = [answer(line) for _ in range(NUM_SLOTS)]
        assert sum(isinstance(one, Met) for one in met) == WINDOW_PIECES
        assert Refused("too many read from the shelf") in met
        ticket = depot.offer(filled(parts()))
        line.send(TO_DEPOT.encode(Want(ticket.id, 1, 0, slot=0)))  # waits for a slot, and keeps nobody else waiting
        with closing(Courier(None, ["nixl"])) as courier:
            assert Taken(ticket).fetch(courier, ticket, timeout=30).places == parts()


def window(size=WINDOW_BYTES, seals=SEALS):
    import fcntl

    descriptor = os.memfd_create("paceline-window", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize("what", ["nothing", "a pipe", "a file", "unsealed", "too small", "too large", "no greeting"])
def test_what_is_no_window_is_not_taken(depot, what, tmp_path):
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", WINDOW_BYTES)  # as large as a window, and nothing is written
    windows = num_windows()
    given = {
        "nothing": list,
        "a pipe": lambda: list(os.pipe())[1:],
        "a file": lambda: [os.open(tmp_path / "file", os.O_RDWR)],
        "unsealed": lambda: [window(seals=0)],
        "too small": lambda: [window(PIECE_BYTES)],
        "too large": lambda: [window(2 * WINDOW_BYTES)],
        "no greeting": lambda: [window()],
    }[what]()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.settimeout(10)
            line.connect(path_of(depot.addresses["memory"]))
            socket.send_fds(line, [b"what" if what == "no greeting" else HERE], given)
            assert line.recv(10) == b""
    finally:
        for descriptor in given:
            os.close(descriptor)
    assert num_windows() == windows


def test_a_window_has_as_many_slots_as_it_has(depot):
    ticket = depot.offer(filled(parts()))
    descriptor = window()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(10)
        line.connect(path_of(depot.addresses["memory"]))
        socket.send_fds(line, [HERE], [descriptor])
        os.close(descriptor)
        assert line.recv(10) == HERE
        for slot in (WINDOW_PIECES, 2**16 - 1):
            line.send(TO_DEPOT.encode(Want(ticket.id, 1, 0, slot)))
            assert TO_COURIER.decode(line.recv(4096)) == Refused("there is no such place")
        line.send(b"\xc1")
        line.send(TO_DEPOT.encode(Want(ticket.id, 1, 0, 7)))
        assert TO_COURIER.decode(line.recv(4096)) == Piece(1, 0, checksum(memoryview(parts()[1])))
        line.send(TO_DEPOT.encode(Want(ticket.id, 1, 0, -1)))  # a window's taker gets nothing any other way
        assert line.recv(4096) == b""


def test_takers_that_only_knock_leave_nothing(depot):
    before = num_descriptors()
    for _ in range(50):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.connect(path_of(depot.addresses["memory"]))
    ticket = depot.offer(filled(parts()))
    with closing(Courier(None, ["memory"])) as courier:
        Taken(ticket).fetch(courier, ticket)
    assert num_descriptors() <= before + 8


@contextmanager
def false_depot(respond):
    """`respond` to the first wants, as a taker sends them, with frames."""
    wants = []
    with zmq.Context() as context, context.socket(zmq.ROUTER) as line:
        line.linger = 0
        port = line.bind_to_random_port("tcp://127.0.0.1")

        def run():
            while line.poll(5000):
                peer, data = line.recv_multipart()
                if data == b"stop":
                    return
                wants.append(TO_DEPOT.decode(data))
                for frames in respond(wants):
                    line.send_multipart([peer, *frames])

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield Ticket(bytes(16), {"socket": f"tcp://127.0.0.1:{port}"}, [20 * PIECE_BYTES]), wants
        finally:
            with context.socket(zmq.DEALER) as stop:
                stop.connect(f"tcp://127.0.0.1:{port}")
                stop.send(b"stop")
                thread.join(10)


def piece(index=0, number=0, data=bytes(PIECE_BYTES), sum=None):
    return [TO_COURIER.encode(Piece(index, number, checksum(memoryview(data)) if sum is None else sum)), data]


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (piece(sum=1), "corrupt"),
        (piece(data=bytes(PIECE_BYTES - 1)), "corrupt"),
        (piece(data=bytes(PIECE_BYTES + 1)), "corrupt"),
        (piece(data=b""), "corrupt"),
        (piece()[:1], "corrupt"),
        (piece(index=1), "not asked for"),
        (piece(number=19), "not asked for"),
        ([b"\xc1"], "does not speak"),
        ([os.urandom(100)], "does not speak"),
        ([TO_COURIER.encode(Met(b"", 0, 0))], "not asked for"),
        ([TO_COURIER.encode(Refused("because"))], "because"),
        ([TO_COURIER.encode(Piece(0, 0, 0)), b"", b""], "corrupt"),
    ],
)
def test_a_depot_that_answers_wrongly(frames, message):
    with (
        false_depot(lambda wants: [frames] if len(wants) == 1 else []) as (ticket, _),
        closing(Courier(None, ["socket"])) as courier,
        pytest.raises(TransferFailed, match=message),
    ):
        Taken(ticket).fetch(courier, ticket, timeout=30)


def test_a_piece_sent_twice_is_refused():
    with (
        false_depot(lambda wants: [piece(), piece()] if len(wants) == 1 else []) as (ticket, _),
        closing(Courier(None, ["socket"])) as courier,
        pytest.raises(TransferFailed, match="not asked for"),
    ):
        Taken(ticket).fetch(courier, ticket, timeout=30)


def test_a_depot_that_says_nothing(monkeypatch):
    monkeypatch.setattr(fetch_module, "SILENCE_SECONDS", 0.3)
    with false_depot(lambda wants: []) as (ticket, wants):
        with closing(Courier(None, ["socket"])) as courier, pytest.raises(TransferFailed, match="said nothing"):
            Taken(ticket).fetch(courier, ticket, timeout=30)
        assert len(wants) == WINDOW_PIECES  # no more is under way, however much is wanted


@pytest.mark.parametrize(
    "address", ["", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "tcp://[::", "ipc:///tmp/x", "x" * 256]
)
@pytest.mark.parametrize("kind", ["memory", "nixl", "socket"])
def test_a_ticket_that_leads_nowhere(address, kind):
    ticket = Ticket(bytes(16), {kind: address}, [1])
    with closing(Courier(None)) as courier, pytest.raises(TransferFailed):
        Taken(ticket).fetch(courier, ticket, timeout=5)


@pytest.mark.parametrize("key", ["x", "x" * 39, "\x7f" * 40, "é" * 40])
def test_a_ticket_with_a_key_that_is_none(key):
    ticket = Ticket(bytes(16), {"socket": "tcp://127.0.0.1:9"}, [1], key)
    with closing(Courier(Security(generate()))) as courier, pytest.raises(TransferFailed, match="no public key"):
        Taken(ticket).fetch(courier, ticket, timeout=5)

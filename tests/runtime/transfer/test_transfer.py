"""What every kind of transfer promises, between a depot and couriers of one process."""

import threading
import time
from contextlib import closing
from operator import le

import pytest

from paceline.core.errors import InvalidConfig
from paceline.runtime.transfer import fetch as fetch_module
from paceline.runtime.transfer.channels import nixl_agent
from paceline.runtime.transfer.channels.kinds import KINDS
from paceline.runtime.transfer.client import Courier
from paceline.runtime.transfer.errors import TransferCancelled, TransferFailed
from paceline.runtime.transfer.handle import Ticket
from paceline.runtime.transfer.pieces import PIECE_BYTES
from paceline.runtime.transfer.server import Depot
from paceline.runtime.transfer.transfer import Parcel
from paceline.runtime.wire.keys import Security, generate
from tests.runtime.transfer.parcels import Taken, filled, num_descriptors, num_windows, parts


@pytest.fixture
def depot():
    with closing(Depot("127.0.0.1", None)) as depot:
        yield depot


@pytest.fixture(params=KINDS)
def courier(request):
    """It takes by this kind and no other."""
    if request.param == "nixl" and not nixl_agent.is_installed():
        pytest.skip("NIXL is not installed: pip install 'paceline[transfer]'")
    with closing(Courier(None, [request.param])) as courier:
        yield courier


def test_all_parts_arrive_whole(depot, courier):
    data = parts()
    ticket = depot.offer(filled(data))
    for _ in range(3):
        taken = Taken(ticket).fetch(courier, ticket)
        assert taken.order == [0, 1, 2, 3, 4]
        assert taken.places == data


def test_any_parts_in_any_order(depot, courier):
    data = parts()
    ticket = depot.offer(filled(data))
    taken = Taken(ticket).fetch(courier, ticket, [4, 1])
    assert taken.order == [4, 1]
    assert [bytes(place) == part for place, part in zip(taken.places, data, strict=True)] == [
        True,
        True,
        False,
        False,
        True,
    ]
    assert Taken(ticket).fetch(courier, ticket, []).order == []
    for wrong in ([5], [-1], [1, 1]):
        with pytest.raises(ValueError, match="each once"):
            Taken(ticket).fetch(courier, ticket, wrong)


def test_parts_are_taken_as_they_become_ready(depot, courier):
    data = parts((100, PIECE_BYTES + 1, 7))
    parcel = Parcel([len(part) for part in data])
    ticket = depot.offer(parcel)
    taken = Taken(ticket)

    def arrived(index):
        taken.order.append(index)
        if index > 0:  # the next one is only made once this one is there: nothing waits for the whole
            parcel.fill(index - 1, memoryview(data[index - 1]))

    parcel.fill(2, memoryview(data[2]))
    courier.fetch(ticket, range(3), lambda i: memoryview(taken.places[i]), arrived, timeout=30)
    assert taken.order == [2, 1, 0]
    assert taken.places == data


def test_fetches_at_once_from_many_threads(depot, courier):
    data = parts()
    ticket = depot.offer(filled(data))
    results = [Taken(ticket) for _ in range(6)]
    threads = [threading.Thread(target=one.fetch, args=(courier, ticket)) for one in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(one.places == data for one in results)


def test_several_sources_of_one_thing(courier):
    data = parts()
    with closing(Depot("127.0.0.1", None)) as first, closing(Depot("127.0.0.1", None)) as second:
        parcel = filled(data)
        taken = Taken(ticket := first.offer(parcel))
        taken.fetch(courier, ticket, [0, 2, 4]).fetch(courier, second.offer(parcel), [1, 3])
        assert taken.places == data


def test_a_withdrawn_parcel_is_gone(depot, courier):
    ticket, other = depot.offer(filled(parts())), depot.offer(filled(parts()))
    depot.withdraw(ticket)
    depot.withdraw(ticket)
    with pytest.raises(TransferFailed, match="withdrawn"):
        Taken(ticket).fetch(courier, ticket)
    assert Taken(other).fetch(courier, other).places == parts()


@pytest.mark.parametrize("end", ["withdraw", "abandon", "close"])
def test_those_who_wait_hear_of_the_end(courier, end):
    with closing(Depot("127.0.0.1", None)) as depot:
        parcel = Parcel([4, 4])
        parcel.fill(0, memoryview(b"here"))
        ticket = depot.offer(parcel)
        taken = Taken(ticket)

        def arrived(index):
            {
                "withdraw": lambda: depot.withdraw(ticket),
                "abandon": lambda: parcel.abandon("out of memory"),
                "close": depot.close,
            }[end]()

        message = {"withdraw": "withdrawn", "abandon": "out of memory", "close": "gone"}[end]
        with pytest.raises(TransferFailed, match=message):
            courier.fetch(ticket, [0, 1], lambda i: memoryview(taken.places[i]), arrived, timeout=30)


def test_a_fetch_can_be_cancelled(depot, courier):
    ticket = depot.offer(Parcel([4]))
    cancelled = threading.Event()
    timer = threading.Timer(0.1, cancelled.set)
    timer.start()
    with pytest.raises(TransferCancelled):
        Taken(ticket).fetch(courier, ticket, cancelled=cancelled, timeout=30)
    cancelled.set()
    full = depot.offer(filled(parts()))
    with pytest.raises(TransferCancelled):
        Taken(full).fetch(courier, full, cancelled=cancelled)
    assert Taken(full).fetch(courier, full).places == parts()


def test_a_fetch_has_an_end(depot, courier):
    ticket = depot.offer(Parcel([4]))
    with pytest.raises(TransferFailed, match=r"not arrived after 0\.1 s"):
        Taken(ticket).fetch(courier, ticket, timeout=0.1)


@pytest.mark.parametrize("courier", ["socket"], indirect=True)
def test_patience_is_not_silence(depot, courier, monkeypatch):
    """A part that takes longer than a depot may be silent: it says that it is still there."""
    monkeypatch.setattr(fetch_module, "SILENCE_SECONDS", 1.6)
    parcel = Parcel([4])
    ticket = depot.offer(parcel)
    timer = threading.Timer(2.2, parcel.fill, (0, memoryview(b"late")))
    timer.start()
    assert Taken(ticket).fetch(courier, ticket, timeout=30).places == [b"late"]
    timer.join()


def test_bytes_that_changed_are_not_taken(depot, courier):
    data = [bytearray(part) for part in parts()]
    ticket = depot.offer(filled(data))
    data[2][PIECE_BYTES + 17] ^= 1
    taken = Taken(ticket)
    with pytest.raises(TransferFailed, match="part 2 is corrupt"):
        taken.fetch(courier, ticket)
    assert 2 not in taken.order


def test_a_wrong_ticket_gets_nothing(depot, courier):
    ticket = depot.offer(filled(parts()))
    forged = Ticket(bytes(16), ticket.addresses, ticket.sizes)
    with pytest.raises(TransferFailed, match="not here"):
        Taken(forged).fetch(courier, forged)
    longer = Ticket(ticket.id, ticket.addresses, [*ticket.sizes, 4])
    with pytest.raises(TransferFailed, match="no such part"):
        Taken(longer).fetch(courier, longer, [5])
    larger = Ticket(ticket.id, ticket.addresses, [4 * PIECE_BYTES] * 5)
    with pytest.raises(TransferFailed, match=r"corrupt|no such part"):
        Taken(larger).fetch(courier, larger, [1])


def test_a_place_that_does_not_fit_ends_the_fetch(depot, courier):
    ticket = depot.offer(filled(parts()))
    for place in (memoryview(bytes(5)), memoryview(bytearray(4)), memoryview(bytearray(10))[::2]):
        with pytest.raises(ValueError, match="writable"):
            courier.fetch(ticket, [1], lambda i, place=place: place, lambda i: None)
    assert Taken(ticket).fetch(courier, ticket).places == parts()


def test_what_callbacks_raise_comes_through(depot, courier):
    ticket = depot.offer(filled(parts()))

    def arrived(index):
        raise KeyError(index)

    with pytest.raises(KeyError):
        courier.fetch(ticket, [1], lambda i: memoryview(bytearray(5)), arrived)


def test_nobody_there(courier):
    with closing(Depot("127.0.0.1", None)) as depot:
        ticket = depot.offer(filled(parts()))
    started = time.monotonic()
    with pytest.raises(TransferFailed, match=r"gone|no such depot"):
        Taken(ticket).fetch(courier, ticket)
    assert time.monotonic() - started < 5


def test_without_keys_only_this_machine():
    with pytest.raises(InvalidConfig, match="paceline keys"):
        Depot("0.0.0.0", None)


@pytest.mark.parametrize("kind", ["memory", "socket"])
def test_keys(kind):
    """Workers of one role share a key; others may be on the list."""
    own, friend = generate(), generate()
    with closing(Depot("127.0.0.1", Security(own, allowed=frozenset([friend.public])))) as depot:
        ticket = depot.offer(filled(parts()))
        for pair in (own, friend):
            with closing(Courier(Security(pair), [kind])) as courier:
                assert Taken(ticket).fetch(courier, ticket).places == parts()
        with closing(Courier(None, [kind])) as courier, pytest.raises(TransferFailed, match="keys to all"):
            Taken(ticket).fetch(courier, ticket)


def test_whose_key_is_not_on_the_list_gets_nothing_even_with_a_ticket():
    own, stranger = generate(), generate()
    with closing(Depot("127.0.0.1", Security(own))) as depot:
        ticket = depot.offer(filled(parts()))
        with closing(Courier(Security(stranger), ["socket"])) as courier, pytest.raises(TransferFailed, match="key"):
            Taken(ticket).fetch(courier, ticket)
        other = Ticket(ticket.id, ticket.addresses, ticket.sizes, stranger.public)
        with closing(Courier(Security(own), ["socket"])) as courier, pytest.raises(TransferFailed):
            Taken(other).fetch(courier, other, timeout=2)


def test_a_courier_with_keys_takes_nothing_in_the_clear(depot):
    ticket = depot.offer(filled(parts()))
    with closing(Courier(Security(generate()))) as courier, pytest.raises(TransferFailed, match="keys to all"):
        Taken(ticket).fetch(courier, ticket)


def test_a_small_wish_is_not_kept_waiting_by_a_large_one(depot, courier):
    """While one taker is in the middle of much, with as much under way as may be, another gets what it wants."""
    much, little = depot.offer(filled(parts([PIECE_BYTES] * 20))), depot.offer(filled(parts([100])))
    served = []

    def arrived(index):
        if index == 0:
            with closing(Courier(None)) as other:
                served.append(Taken(little).fetch(other, little, timeout=10).places)

    places = [bytearray(PIECE_BYTES) for _ in range(20)]
    courier.fetch(much, range(20), lambda i: memoryview(places[i]), arrived)
    assert served == [parts([100])]
    assert places == parts([PIECE_BYTES] * 20)


def holdings():
    return num_descriptors(), num_windows(), threading.active_count()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_stays_behind(kind):
    """Fetches that are broken off, and ends of either side, leave no descriptor, window or thread."""
    if kind == "nixl" and not nixl_agent.is_installed():
        pytest.skip("NIXL is not installed: pip install 'paceline[transfer]'")

    def use(times):
        with closing(Courier(None, [kind])) as courier, closing(Depot("127.0.0.1", None)) as depot:
            ticket, unfilled = depot.offer(filled(parts())), depot.offer(Parcel([4]))
            for _ in range(times):
                Taken(ticket).fetch(courier, ticket)
                with pytest.raises(TransferFailed):
                    Taken(unfilled).fetch(courier, unfilled, timeout=0.01)

    use(1)
    before = holdings()
    use(5)
    deadline = time.monotonic() + 10
    while not all(map(le, holdings(), before)) and time.monotonic() < deadline:  # ZeroMQ closes in the background
        time.sleep(0.02)
    assert all(map(le, holdings(), before))


def test_lines_to_depots_that_are_gone_are_not_kept(courier):
    for _ in range(4):
        with closing(Depot("127.0.0.1", None)) as depot:
            ticket = depot.offer(filled(parts()))
            Taken(ticket).fetch(courier, ticket)
    with closing(Depot("127.0.0.1", None)) as depot:
        ticket = depot.offer(filled(parts()))
        deadline = time.monotonic() + 10
        while courier.num_idle != 1 and time.monotonic() < deadline:  # a moment after the other end has closed
            Taken(ticket).fetch(courier, ticket)
        assert courier.num_idle == 1
        assert Taken(ticket).fetch(courier, ticket).places == parts()

"""A worker that gives and takes is killed: those it gave to and took from hear of it, go on, and no shared memory is left."""

import multiprocessing
import threading
import time
from contextlib import closing

import pytest

from paceline.runtime.transfer.channels.kinds import pick_kinds
from paceline.runtime.transfer.client import Courier
from paceline.runtime.transfer.errors import TransferFailed
from paceline.runtime.transfer.server import Depot
from paceline.runtime.transfer.transfer import Parcel
from tests.runtime.transfer.parcels import Taken, filled, num_windows, parts

SIZES = (3_000_000, 7)
KINDS = pick_kinds(None, None)


def half_filled():
    parcel = Parcel(SIZES)
    parcel.fill(0, memoryview(parts(SIZES)[0]))
    return parcel


def live(line):
    """Offers a parcel that is never complete, and waits for one that is not either, by every kind."""
    depot = Depot("127.0.0.1", None)
    line.send(depot.offer(half_filled()))
    ticket = line.recv()

    def fetch(kind):
        places = [bytearray(size) for size in SIZES]
        with closing(Courier(None, [kind])) as courier:
            courier.fetch(ticket, [0, 1], lambda i: memoryview(places[i]), lambda i: line.send((kind, i)))

    for kind in KINDS:
        threading.Thread(target=fetch, args=(kind,), daemon=True).start()
    line.recv()


@pytest.fixture
def worker():
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=live, args=(there,), daemon=True)
    process.start()
    yield process, here
    process.kill()
    process.join(10)
    here.close()
    there.close()


def test_a_worker_is_killed(worker):
    process, line = worker
    windows = num_windows()
    failures = {}
    arrived = threading.Barrier(len(KINDS) + 1)

    def fetch(kind):
        taken = Taken(theirs)
        with closing(Courier(None, [kind])) as courier:
            try:
                courier.fetch(
                    theirs, [0, 1], lambda i: memoryview(taken.places[i]), lambda i: arrived.wait(60), timeout=90
                )
            except TransferFailed as failed:
                failures[kind] = str(failed), bytes(taken.places[0])

    with closing(Depot("127.0.0.1", None)) as depot:
        theirs, ours = line.recv(), half_filled()
        line.send(depot.offer(ours))
        threads = [threading.Thread(target=fetch, args=(kind,)) for kind in KINDS]
        for thread in threads:
            thread.start()
        arrived.wait(60)  # here everybody has the first part and waits for the second, and so over there:
        assert {line.recv() for _ in KINDS} == {(kind, 0) for kind in KINDS}
        assert num_windows() == windows + 2 * (
            "memory" in KINDS
        )  # the one given to the worker, and the one taken from it

        process.kill()
        killed = time.monotonic()
        for thread in threads:
            thread.join(30)
        assert failures.keys() == set(KINDS)
        assert all("gone" in why and first == parts(SIZES)[0] for why, first in failures.values())
        while num_windows() > windows and time.monotonic() - killed < 10:
            time.sleep(0.01)
        assert num_windows() == windows
        assert time.monotonic() - killed < 10

        ours.fill(1, memoryview(parts(SIZES)[1]))  # for takers that are no more
        ticket = depot.offer(filled(parts()))
        for kind in KINDS:
            with closing(Courier(None, [kind])) as courier:
                assert Taken(ticket).fetch(courier, ticket, timeout=30).places == parts()

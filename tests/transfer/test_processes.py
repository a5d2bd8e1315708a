"""A worker that serves and fetches transfers is killed: its peers notice, continue, and no shared memory is left."""

import multiprocessing
import threading
from contextlib import closing

import pytest

from paceline.transfer.client import TransferClient
from paceline.transfer.pool import pick_channels
from paceline.transfer.server import TransferServer
from paceline.transfer.transfer import Transfer, TransferFailed
from tests.processes.target_harness import until
from tests.transfer.transfers import Destination, filled, num_segments, random_parts

SIZES = (3_000_000, 7)
CHANNELS = pick_channels(None, None)


def half_filled():
    transfer = Transfer(SIZES)
    transfer.fill(0, memoryview(random_parts(SIZES)[0]))
    return transfer


def run_worker(pipe):
    """Offer a transfer that is never complete, and fetch one that is never complete either, over every channel."""
    server = TransferServer("127.0.0.1", None)
    pipe.send(server.offer(half_filled()))
    handle = pipe.recv()

    def fetch(channel):
        buffers = [bytearray(size) for size in SIZES]
        with closing(TransferClient(None, [channel])) as client:
            client.fetch(handle, [0, 1], lambda i: memoryview(buffers[i]), lambda i: pipe.send((channel, i)))

    for channel in CHANNELS:
        threading.Thread(target=fetch, args=(channel,), daemon=True).start()
    pipe.recv()


@pytest.fixture
def worker():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_worker, args=(theirs,), daemon=True)
    process.start()
    yield process, ours
    process.kill()
    process.join(10)
    ours.close()
    theirs.close()


def test_peers_of_a_killed_worker_continue(worker):
    process, pipe = worker
    num_before = num_segments()
    failures = {}
    all_have_part_0 = threading.Barrier(len(CHANNELS) + 1)

    def fetch(channel):
        destination = Destination(theirs)
        with closing(TransferClient(None, [channel])) as client:
            try:
                client.fetch(
                    theirs,
                    [0, 1],
                    lambda i: memoryview(destination.buffers[i]),
                    lambda i: all_have_part_0.wait(60),
                    timeout=90,
                )
            except TransferFailed as failed:
                failures[channel] = str(failed), bytes(destination.buffers[0])

    with closing(TransferServer("127.0.0.1", None)) as server:
        theirs, ours = pipe.recv(), half_filled()
        pipe.send(server.offer(ours))
        threads = [threading.Thread(target=fetch, args=(channel,)) for channel in CHANNELS]
        for thread in threads:
            thread.start()
        all_have_part_0.wait(60)  # every fetch of both processes now waits for part 1
        assert {pipe.recv() for _ in CHANNELS} == {(channel, 0) for channel in CHANNELS}
        # one segment as a server and one as a client
        assert num_segments() == num_before + 2 * ("memory" in CHANNELS)

        process.kill()
        for thread in threads:
            thread.join(30)
        assert failures.keys() == set(CHANNELS)
        # They did not wait for the end of a time limit
        assert all("gone" in why and first == random_parts(SIZES)[0] for why, first in failures.values())
        until(lambda: num_segments() == num_before)

        ours.fill(1, memoryview(random_parts(SIZES)[1]))  # its client is dead
        handle = server.offer(filled(random_parts()))
        for channel in CHANNELS:
            with closing(TransferClient(None, [channel])) as client:
                assert Destination(handle).fetch(client, handle, timeout=30).buffers == random_parts()

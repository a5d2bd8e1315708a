"""Transfers with random parts, and buffers to fetch them into."""

import gc
import random
from pathlib import Path

from paceline.transfer.transfer import CHUNK_BYTES, Transfer

SIZES = (0, 5, 3 * CHUNK_BYTES, CHUNK_BYTES, 2 * CHUNK_BYTES + 12_345)


def random_parts(sizes=SIZES, seed=1):
    rng = random.Random(seed)
    return [rng.randbytes(size) for size in sizes]


def filled(parts):
    transfer = Transfer([len(part) for part in parts])
    for index, part in enumerate(parts):
        transfer.fill(index, memoryview(part))
    return transfer


class Destination:
    """Buffers for the parts of a handle, and the order in which parts arrived."""

    def __init__(self, handle):
        self.buffers = [bytearray(size) for size in handle.sizes]
        self.order = []

    def fetch(self, client, handle, indices=None, **options):
        indices = range(len(handle.sizes)) if indices is None else indices
        client.fetch(handle, indices, lambda i: memoryview(self.buffers[i]), self.order.append, **options)
        return self


def num_segments():
    """Shared memory segments that this process has mapped, without those that only a caught exception references."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("paceline-segment")


def num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))

"""Parcels, and places to take them to."""

import gc
import random
from pathlib import Path

from paceline.runtime.transfer.pieces import PIECE_BYTES
from paceline.runtime.transfer.transfer import Parcel

SIZES = (0, 5, 3 * PIECE_BYTES, PIECE_BYTES, 2 * PIECE_BYTES + 12_345)


def parts(sizes=SIZES, seed=1):
    draw = random.Random(seed)
    return [draw.randbytes(size) for size in sizes]


def filled(data):
    parcel = Parcel([len(part) for part in data])
    for index, part in enumerate(data):
        parcel.fill(index, memoryview(part))
    return parcel


class Taken:
    """Where a fetch puts things, and in which order they came."""

    def __init__(self, ticket):
        self.places = [bytearray(size) for size in ticket.sizes]
        self.order = []

    def fetch(self, courier, ticket, wanted=None, **options):
        wanted = range(len(ticket.sizes)) if wanted is None else wanted
        courier.fetch(ticket, wanted, lambda i: memoryview(self.places[i]), self.order.append, **options)
        return self


def num_windows():
    """Windows of shared memory that this process has mapped. Not those that only a caught exception still knows."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("paceline-window")


def num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))

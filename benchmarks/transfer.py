"""A KV hand-off between two processes, by every kind of transfer, beside a plain copy: `python benchmarks/transfer.py`.

One process has the keys and values of a prompt in the embedded model's cache layout, a part a layer, and gives them; this one
takes them. *ready*: all parts were filled before the clock started. *filled meanwhile*: the giver begins when the clock does, a
layer after the other, checksums included, and the taker takes what is there. *plain copy* is the same bytes from one array of
this process to another, a layer at a time; files are written and read through the page cache. Contenders take turns within a
round; medians over rounds. *CPU* is what both processes spent, all their threads: where others keep the machine busy it says
more than the clock. The bytes that arrive are compared with those that were given, outside the clock.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.connection import Connection

import numpy as np
import torch

from paceline.models.loading.load import open_checkpoint
from paceline.runtime.transfer.channels import nixl_agent
from paceline.runtime.transfer.channels.channel_pool import pick_channels
from paceline.runtime.transfer.client import TransferClient
from paceline.runtime.transfer.files import NixlFiles, PlainFiles, Range
from paceline.runtime.transfer.messages import TransferHandle
from paceline.runtime.transfer.server import TransferServer
from paceline.runtime.transfer.transfer import Transfer, checksum
from paceline.runtime.wire.keys import KeyPair, Security, generate_key_pair

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
ENCRYPTED = "socket, encrypted"
SUMS = "checksums alone"
WRITTEN = "written"


def layers(count: int, size: int) -> list[Bytes]:
    """The same in both processes."""
    draw = np.random.default_rng(1)
    return [draw.integers(0, 256, size, np.uint8) for _ in range(count)]


def give(line: Connection, count: int, size: int, pair: KeyPair) -> None:
    """The other process: does as it is told."""
    data = layers(count, size)
    with (
        closing(TransferServer("127.0.0.1", None)) as plain,
        closing(TransferServer("127.0.0.1", Security(pair))) as guarded,
    ):
        full = Transfer([size] * count)
        fill(full, data)
        line.send({False: plain.offer(full), True: guarded.offer(full)})
        while (order := line.recv()) is not None:
            if order == "cpu":
                line.send(time.process_time())
                continue
            server, transfer = guarded if order == ENCRYPTED else plain, Transfer([size] * count)
            handle = server.offer(transfer)
            line.send(handle)
            fill(transfer, data)
            line.recv()
            server.withdraw(handle)


def fill(transfer: Transfer, data: list[Bytes]) -> None:
    for index, layer in enumerate(data):
        transfer.fill(index, memoryview(layer))


class Bench:
    """The taking process, and the line to the other."""

    def __init__(self, line: Connection, count: int, size: int, pair: KeyPair) -> None:
        self.data = layers(count, size)
        self.places = [np.zeros(size, np.uint8) for _ in range(count)]
        self.clients = {kind: TransferClient(None, [kind]) for kind in pick_channels(None, None)}
        self.clients[ENCRYPTED] = TransferClient(Security(pair), ["socket"])
        self._line = line
        self._full: dict[bool, TransferHandle] = line.recv()

    def ready(self, kind: str) -> float:
        return self._seconds(lambda: self._take(kind, self._full[kind == ENCRYPTED]))

    def meanwhile(self, kind: str) -> float:
        def hand_over() -> None:
            self._line.send(kind)
            self._take(kind, self._line.recv())

        elapsed = self._seconds(hand_over)
        self._line.send("taken")
        return elapsed

    def copy(self) -> float:
        return self._seconds(lambda: [np.copyto(*pair) for pair in zip(self.places, self.data, strict=True)])

    def sums(self) -> float:
        return self._seconds(lambda: [checksum(memoryview(layer)) for layer in self.data])

    def write(self, files: PlainFiles | NixlFiles, file: int) -> float:
        return self._seconds(lambda: files.write(file, _ranges(self.data)))

    def read(self, files: PlainFiles | NixlFiles, file: int) -> float:
        return self._seconds(lambda: files.read(file, _ranges(self.places)))

    def cpu(self) -> float:
        """Of both processes."""
        self._line.send("cpu")
        there: float = self._line.recv()
        return there + time.process_time()

    def close(self) -> None:
        self._line.send(None)
        for client in self.clients.values():
            client.close()

    def _take(self, kind: str, handle: TransferHandle) -> None:
        wanted = range(len(self.places))
        self.clients[kind].fetch(handle, wanted, lambda index: memoryview(self.places[index]), lambda index: None)

    @staticmethod
    def _seconds(action: Callable[[], object]) -> float:
        started = time.perf_counter()
        action()
        return time.perf_counter() - started


def _ranges(arrays: list[Bytes]) -> list[Range]:
    return [Range(index * array.nbytes, memoryview(array)) for index, array in enumerate(arrays)]


@contextmanager
def contenders(bench: Bench) -> Iterator[dict[tuple[str, str], Callable[[], float]]]:
    found: dict[tuple[str, str], Callable[[], float]] = {("plain copy", ""): bench.copy, (SUMS, ""): bench.sums}
    for kind in bench.clients:
        found[kind, "ready"] = lambda kind=kind: bench.ready(kind)  # type: ignore[misc]
        found[kind, "filled meanwhile"] = lambda kind=kind: bench.meanwhile(kind)  # type: ignore[misc]
    movers: dict[str, PlainFiles | NixlFiles] = {"file, plainly": PlainFiles()}
    if nixl_agent.is_installed():
        movers["file, nixl"] = NixlFiles()
    with ExitStack() as stack:
        for name, files in movers.items():
            both = files, stack.enter_context(tempfile.TemporaryFile()).fileno()
            found[name, WRITTEN] = lambda both=both: bench.write(*both)  # type: ignore[misc]
            found[name, "read"] = lambda both=both: bench.read(*both)  # type: ignore[misc]
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()

    config = open_checkpoint(options.model).config
    count, size = config.num_layers, 2 * options.tokens * config.num_kv_heads * config.head_dim * torch.float32.itemsize
    pair = generate_key_pair()
    here, there = multiprocessing.Pipe()
    giver = multiprocessing.get_context("spawn").Process(target=give, args=(there, count, size, pair), daemon=True)
    giver.start()
    with closing(Bench(here, count, size, pair)) as bench, contenders(bench) as found:
        times: dict[tuple[str, str], list[tuple[float, float]]] = {contender: [] for contender in found}
        for round in range(-1, options.rounds):  # the first is to warm up: connections, pages
            for contender, run in found.items():
                for place in bench.places:
                    place.fill(0)
                before = bench.cpu()
                result = run(), bench.cpu() - before
                arrives = contender[0] != SUMS and contender[1] != WRITTEN  # what was written is read next
                if arrives and not all(map(np.array_equal, bench.places, bench.data)):
                    raise SystemExit(f"{contender} brought other bytes than were given")
                if round >= 0:
                    times[contender].append(result)
    giver.join(10)

    total = count * size
    print(f"{options.tokens} tokens, {count} layers of {size / 2**20:.1f} MiB, {total / 1e6:.0f} MB")
    print(f"{options.rounds} rounds, load average {os.getloadavg()[0]:.1f}\n")
    print("| | | MB/s | of a plain copy | ms | CPU ms |\n|---|---|---:|---:|---:|---:|")
    base = statistics.median(wall for wall, _ in times["plain copy", ""])
    for (name, how), results in times.items():
        wall, cpu = (statistics.median(column) for column in zip(*results, strict=True))
        figures = f"{total / wall / 1e6:,.0f} | {base / wall:.2f} | {wall * 1e3:.0f} | {cpu * 1e3:.0f}"
        print(f"| {name} | {how} | {figures} |")


if __name__ == "__main__":
    main()

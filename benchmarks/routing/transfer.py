"""Transfer of a prompt's KV between two processes, over every channel: `python benchmarks/routing/transfer.py`.

The source process has the KV of a prompt in the embedded model's cache layout, one part per layer. This process
fetches it.

- *ready*: all parts are filled before the clock starts.
- *filled meanwhile*: the source fills one layer after the other, with checksums, from the moment the clock starts.
- *plain copy*: the same bytes from one array of this process to another, layer by layer.

Variants alternate within a round; the table has medians over rounds. *CPU* is the time of all threads of both
processes, which depends less on other load than the wall time. The received bytes are compared with the sent ones,
outside the clock.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection

import numpy as np
import torch

from paceline.kernels.cpu.checksums import crc32
from paceline.models.loading.load import open_checkpoint
from paceline.transfer.client import TransferClient
from paceline.transfer.pool import pick_channels
from paceline.transfer.server import TransferServer
from paceline.transfer.transfer import Transfer
from paceline.wire.keys import KeyPair, Security, generate_key_pair
from paceline.wire.transfer_messages import TransferHandle

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
ENCRYPTED = "socket, encrypted"
SUMS = "checksums alone"


def layers(count: int, size: int) -> list[Bytes]:
    """Random layers, equal in both processes."""
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, size, np.uint8) for _ in range(count)]


def run_source(pipe: Connection, count: int, size: int, pair: KeyPair) -> None:
    """Source process: serves transfers by commands from the pipe."""
    data = layers(count, size)
    with (
        closing(TransferServer("127.0.0.1", None)) as plain,
        closing(TransferServer("127.0.0.1", Security(pair))) as encrypted,
    ):
        full = Transfer([size] * count)
        fill(full, data)
        pipe.send({False: plain.offer(full), True: encrypted.offer(full)})
        while (command := pipe.recv()) is not None:
            if command == "cpu":
                pipe.send(time.process_time())
                continue
            server, transfer = encrypted if command == ENCRYPTED else plain, Transfer([size] * count)
            handle = server.offer(transfer)
            pipe.send(handle)
            fill(transfer, data)
            pipe.recv()
            server.withdraw(handle)


def fill(transfer: Transfer, data: list[Bytes]) -> None:
    for index, layer in enumerate(data):
        transfer.fill(index, memoryview(layer))


class Bench:
    """The destination process, with a pipe to the source."""

    def __init__(self, pipe: Connection, count: int, size: int, pair: KeyPair) -> None:
        self.data = layers(count, size)
        self.buffers = [np.zeros(size, np.uint8) for _ in range(count)]
        self.clients = {channel: TransferClient(None, [channel]) for channel in pick_channels(None, None)}
        self.clients[ENCRYPTED] = TransferClient(Security(pair), ["socket"])
        self._pipe = pipe
        self._full: dict[bool, TransferHandle] = pipe.recv()

    def ready(self, channel: str) -> float:
        return self._seconds(lambda: self._fetch(channel, self._full[channel == ENCRYPTED]))

    def filled_meanwhile(self, channel: str) -> float:
        def request_and_fetch() -> None:
            self._pipe.send(channel)
            self._fetch(channel, self._pipe.recv())

        elapsed = self._seconds(request_and_fetch)
        self._pipe.send("fetched")
        return elapsed

    def copy(self) -> float:
        return self._seconds(lambda: [np.copyto(*pair) for pair in zip(self.buffers, self.data, strict=True)])

    def sums(self) -> float:
        return self._seconds(lambda: [crc32(memoryview(layer)) for layer in self.data])

    def cpu(self) -> float:
        """CPU seconds of both processes."""
        self._pipe.send("cpu")
        remote: float = self._pipe.recv()
        return remote + time.process_time()

    def close(self) -> None:
        self._pipe.send(None)
        for client in self.clients.values():
            client.close()

    def _fetch(self, channel: str, handle: TransferHandle) -> None:
        indices = range(len(self.buffers))
        self.clients[channel].fetch(handle, indices, lambda index: memoryview(self.buffers[index]), lambda index: None)

    @staticmethod
    def _seconds(action: Callable[[], object]) -> float:
        started = time.perf_counter()
        action()
        return time.perf_counter() - started


def variants(bench: Bench) -> dict[tuple[str, str], Callable[[], float]]:
    found: dict[tuple[str, str], Callable[[], float]] = {("plain copy", ""): bench.copy, (SUMS, ""): bench.sums}
    for channel in bench.clients:
        found[channel, "ready"] = lambda channel=channel: bench.ready(channel)  # type: ignore[misc]
        found[channel, "filled meanwhile"] = lambda channel=channel: bench.filled_meanwhile(channel)  # type: ignore[misc]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()

    config = open_checkpoint(options.model).config
    count, size = config.num_layers, 2 * options.tokens * config.num_kv_heads * config.head_dim * torch.float32.itemsize
    pair = generate_key_pair()
    ours, theirs = multiprocessing.Pipe()
    source = multiprocessing.get_context("spawn").Process(
        target=run_source, args=(theirs, count, size, pair), daemon=True
    )
    source.start()
    with closing(Bench(ours, count, size, pair)) as bench:
        found = variants(bench)
        times: dict[tuple[str, str], list[tuple[float, float]]] = {variant: [] for variant in found}
        for round in range(-1, options.rounds):  # the first round warms up connections and pages
            for variant, run in found.items():
                for buffer in bench.buffers:
                    buffer.fill(0)
                before = bench.cpu()
                result = run(), bench.cpu() - before
                if variant[0] != SUMS and not all(map(np.array_equal, bench.buffers, bench.data)):
                    raise SystemExit(f"{variant} returned other bytes than were sent")
                if round >= 0:
                    times[variant].append(result)
    source.join(10)

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

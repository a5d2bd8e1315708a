"""A draft worker that receives invalid messages.

    python benchmarks/pools/pools_fuzz.py --messages 1000000 --connections 10000

A worker process with CURVE. An authenticated peer sends malformed, invalid and out-of-order messages. Other clients
open TCP connections and send nothing, noise, or half a greeting. A valid target uses the worker meanwhile; memory and
open files are measured.
"""

import argparse
import os
import random
import socket
import time
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec
import psutil
import zmq
from pools_fakes import TOKENIZER, VOCAB, decode, until_up, worker_process

from paceline.core.request import SamplingParams, Verification
from paceline.drafting.connection import DraftAddress
from paceline.drafting.proposer import PoolProposer
from paceline.drafting.scheduler import DraftLimits
from paceline.wire.draft_messages import (
    TO_DRAFT_WORKER,
    TO_TARGET,
    VERSION,
    Advance,
    Close,
    Goodbye,
    Hello,
    Open,
    Ping,
    RoundRequest,
)
from paceline.wire.keys import Security, generate_key_pair
from paceline.wire.transport import Connection

RULES: tuple[Verification, ...] = ("coupled", "rejection")


class Fuzzer:
    """Bytes from well-formed messages in any order to pure noise."""

    def __init__(self, seed: int, epoch: int) -> None:
        self._random, self._epoch = random.Random(seed), epoch

    def message(self) -> bytes:
        rng = self._random
        data = bytearray(TO_DRAFT_WORKER.encode(self._valid()))
        kind = rng.random()
        if kind < 0.4:
            return bytes(data)
        if kind < 0.7:
            for _ in range(rng.randint(1, 5)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            return bytes(data)
        if kind < 0.8:
            return bytes(data[: rng.randrange(len(data) + 1)])
        if kind < 0.9:
            return rng.randbytes(rng.randrange(200))
        return msgspec.msgpack.encode(self._value(4))

    def _valid(self) -> object:
        rng, epoch = self._random, self._epoch if self._random.random() < 0.9 else self._random.getrandbits(60)
        number = rng.randrange(50)
        kind = rng.randrange(12)
        if kind < 4:
            ids = [rng.randrange(VOCAB if rng.random() < 0.9 else 2**31) for _ in range(rng.randint(0, 30))]
            sampling = SamplingParams(temperature=rng.random() * 2, top_k=rng.randrange(50), top_p=rng.random() or 1.0)
            return Open(epoch, number, ids, rng.randint(0, 30), sampling, rng.getrandbits(62), rule=rng.choice(RULES))
        if kind < 9:
            steps = [
                RoundRequest(
                    rng.randrange(50), rng.randrange(9), rng.randrange(40), [rng.randrange(VOCAB)], rng.randrange(9)
                )
                for _ in range(rng.randint(0, 8))
            ]
            return Advance(epoch, steps, rng.random() < 0.5)
        return (
            Close(epoch, [number]),
            Ping(rng.getrandbits(40)),
            Hello(rng.randrange(2, 5), 1, TOKENIZER if rng.random() < 0.9 else None),
            Goodbye("bye"),
        )[rng.randrange(4)]

    def _value(self, depth: int) -> object:
        rng = self._random
        kind = rng.randrange(8 if depth else 5)
        if kind < 5:
            return (rng.getrandbits(rng.randint(1, 64)), -1, rng.random() * 1e300, None, rng.randbytes(8))[kind]
        if kind == 5:
            return {str(rng.random()): self._value(depth - 1) for _ in range(3)}
        return [self._value(depth - 1) for _ in range(rng.randrange(12))]


def knock(address: str, count: int, rng: random.Random) -> None:
    """Raw TCP connections, a few hundred at a time, that send nothing, noise, or part of a greeting."""
    where = urlsplit(address)
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x01CURVE" + b"\0" * 15
    held: list[socket.socket] = []
    for _ in range(count):
        line = socket.create_connection((where.hostname or "", where.port or 0), timeout=10)
        line.settimeout(10)
        content = rng.choice(
            (b"", rng.randbytes(200), greeting, greeting[: rng.randrange(40)], b"GET / HTTP/1.1\r\n\r\n")
        )
        with suppress(OSError):
            line.sendall(content)
        held.append(line)
        if len(held) > 200:
            held.pop(rng.randrange(len(held))).close()
    for line in held:
        line.close()


def shoot(line: Connection, fuzzer: Fuzzer, count: int) -> None:
    """Send as fast as the worker receives; discard its responses."""
    for i in range(count):
        data = fuzzer.message()
        while True:
            try:
                line.socket.send(data, zmq.DONTWAIT)
                break
            except zmq.Again:
                line.wait(0.01)
                drain(line)
        if i % 50 == 0:
            drain(line)


def drain(line: Connection) -> None:
    with suppress(zmq.Again):
        while True:
            line.socket.recv_multipart(zmq.DONTWAIT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--connections", type=int, default=10_000)
    args = parser.parse_args()
    pair, own, other = generate_key_pair(), generate_key_pair(), generate_key_pair()
    server = Security(pair, allowed=frozenset([own.public, other.public]))
    with worker_process(0.8, 0.0, DraftLimits(), server) as (address, snapshot):
        process = psutil.Process(os.getpid()).children(recursive=True)
        worker = max(process, key=lambda p: p.memory_info().rss)
        good = PoolProposer([DraftAddress("d", address, Security(own, server=pair.public))], TOKENIZER, VOCAB)
        until_up(good)
        line = Connection(address, TO_TARGET, Security(other, server=pair.public))
        line.send(Hello(VERSION, 1, TOKENIZER, "fuzzer"))
        fuzzer = Fuzzer(0, snapshot().epoch)
        rng = random.Random(1)
        print("| messages | connections | malformed | worker memory MB | open files | valid target: rounds ready |")
        print("|---:|---:|---:|---:|---:|---:|")
        started, parts = time.perf_counter(), 10
        for part in range(1, parts + 1):
            shoot(line, fuzzer, args.messages // parts)
            knock(address, args.connections // parts, rng)
            line.send(Hello(VERSION, 1, TOKENIZER, "fuzzer"))
            run = decode(good, 4, 20, 5, 0.03, first_seed=100 * part)
            counts, seen = good.connections[0].counters, snapshot()
            assert run.tokens > 4 * 20, "the valid target got no drafts"
            memory, files = worker.memory_info().rss / 1e6, worker.num_fds()
            done = part * args.messages // parts, part * args.connections // parts
            print(f"| {done[0]} | {done[1]} | {seen.malformed} | {memory:.1f} | {files} | {counts.ready} |", flush=True)
        print(f"\n{time.perf_counter() - started:.0f} s; faults seen by the valid target: {counts.faults}")
        good.shut_down()
        line.close()


if __name__ == "__main__":
    main()

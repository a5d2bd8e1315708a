"""Time of one routing decision, hashing included, compared with Dynamo's index on the same data.

    python benchmarks/routing/routing_decision.py [--workers 64] [--held 16] [--own 0] [--least 0] [--repeats 2000]

Every worker holds `--held` of 16 shared prefixes of 3,072 tokens and `--own` prefixes of 1,024 tokens that no other worker
has. A prompt is a shared prefix and 200 other tokens. Paceline's time is that of the whole decision: hash, match, cost and
choice, with new loads of the workers each time. Dynamo's time is that of hash and match. Contenders alternate. For Dynamo:

    pip install --no-deps --target DIR ai-dynamo-runtime && PYTHONPATH=DIR python benchmarks/routing/routing_decision.py
"""

import argparse
import json
import os
import random
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from paceline.core.clock import WallClock
from paceline.core.kv_events import BlocksStored
from paceline.core.sequence import BLOCK_SIZE
from paceline.kv.prefix import PrefixSums
from paceline.policy.routing.kv_index import KvIndex
from paceline.policy.routing.kv_router import KvRouter
from paceline.policy.routing.router import RoutedPrompt, WorkerLoad

NUM_SHARED, SHARED, OWN, TAIL, VOCABULARY = 16, 3072, 1024, 200, 49_152
SLOTS = 32
Decision = Callable[[int], object]


class Data:
    """Who holds what."""

    def __init__(self, workers: int, held: int, own: int) -> None:
        self.random = random.Random(7)
        self.workers = workers
        self.shared = [self.tokens(SHARED) for _ in range(NUM_SHARED)]
        self.held = [self.random.sample(range(NUM_SHARED), held) for _ in range(workers)]
        self.own = [[self.tokens(OWN) for _ in range(own)] for _ in range(workers)]

    def tokens(self, count: int) -> list[int]:
        return self.random.choices(range(VOCABULARY), k=count)

    def prefixes(self, worker: int) -> list[tuple[int, list[int]]]:
        """(unique number of the prefix, tokens)"""
        shared = [(number, self.shared[number]) for number in self.held[worker]]
        first = NUM_SHARED + worker * len(self.own[worker])
        return shared + list(enumerate(self.own[worker], first))


def ours(data: Data, prompts: list[list[int]], least: int) -> dict[str, Decision]:
    before, started, index = _peak_mib(), time.perf_counter(), KvIndex(PrefixSums())
    count = 0
    for worker in range(data.workers):
        for number, tokens in data.prefixes(worker):
            keys = range(number << 20, (number << 20) + len(tokens) // BLOCK_SIZE)
            index.apply(f"worker-{worker}", BlocksStored(keys, None, tokens))
            count += len(keys)
    seconds = time.perf_counter() - started
    print(
        f"{data.workers} workers hold {count:,} blocks, {len(index):,} distinct; "
        f"{seconds / count * 1e6:.1f} us to index one, {_peak_mib() - before} MiB for all"
    )
    router = KvRouter(index, WallClock())
    loads = [WorkerLoad(f"worker-{i}", data.random.randrange(least, SLOTS), SLOTS) for i in range(data.workers)]
    buffers = [np.array(prompt, np.int32) for prompt in prompts]
    for i, prompt in enumerate(prompts):  # both must find the prefix, and choose a worker that holds it
        chosen = int(router.choose(RoutedPrompt(buffers[i]), loads).removeprefix("worker-"))
        assert data.shared.index(prompt[:SHARED]) in data.held[chosen]
    sums = PrefixSums()
    return {
        "paceline, block hashes only": lambda i: sums(buffers[i]),
        "paceline, int32 buffer": lambda i: router.choose(RoutedPrompt(buffers[i]), loads),
        "paceline, Python list": lambda i: router.choose(RoutedPrompt(prompts[i]), loads),
    }


def dynamo(data: Data, prompts: list[list[int]]) -> dict[str, Decision]:
    try:
        from dynamo._core import RadixTree, compute_block_hash_for_seq
    except ImportError:
        print("ai-dynamo-runtime is not installed: Paceline alone")
        return {}
    tree: Any = RadixTree()
    for worker in range(data.workers):
        for number, tokens in data.prefixes(worker):
            hashes = compute_block_hash_for_seq(tokens, BLOCK_SIZE)
            blocks = [{"block_hash": (number << 20) + i, "tokens_hash": value} for i, value in enumerate(hashes)]
            event = {"event_id": number, "data": {"stored": {"parent_hash": None, "blocks": blocks}}, "dp_rank": 0}
            tree.apply_event(worker, json.dumps(event).encode())
    for prompt in prompts:
        scores = tree.find_matches(compute_block_hash_for_seq(prompt, BLOCK_SIZE)).scores
        number = data.shared.index(prompt[:SHARED])
        assert scores == {(i, 0): SHARED // BLOCK_SIZE for i, held in enumerate(data.held) if number in held}
    return {
        "Dynamo, hash and match": lambda i: tree.find_matches(compute_block_hash_for_seq(prompts[i], BLOCK_SIZE)),
        "Dynamo, scores read": lambda i: tree.find_matches(compute_block_hash_for_seq(prompts[i], BLOCK_SIZE)).scores,
    }


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--held", type=int, default=NUM_SHARED)
    parser.add_argument("--own", type=int, default=0)
    parser.add_argument("--least", type=int, default=0, help=f"fewest running sequences of a worker, of {SLOTS}")
    parser.add_argument("--repeats", type=int, default=2000)
    options = parser.parse_args()
    data = Data(options.workers, options.held, options.own)
    there = sorted({number for held in data.held for number in held})
    prompts = [data.shared[data.random.choice(there)] + data.tokens(TAIL) for _ in range(32)]
    contenders = ours(data, prompts, options.least)
    contenders |= dynamo(data, prompts)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(options.repeats):
        for name, decide in contenders.items():
            started = time.perf_counter()
            decide(i % len(prompts))
            seconds[name].append(time.perf_counter() - started)
    print(f"load average {os.getloadavg()[0]:.1f}\n\n| | p10 us | median us | p90 us |\n|---|---:|---:|---:|")
    for name, taken in seconds.items():
        tenths = statistics.quantiles(taken, n=10)
        print(f"| {name} | {tenths[0] * 1e6:.1f} | {statistics.median(taken) * 1e6:.1f} | {tenths[8] * 1e6:.1f} |")


if __name__ == "__main__":
    main()

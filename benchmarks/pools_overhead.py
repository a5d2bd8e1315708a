"""What the coordinator costs a step: `python benchmarks/pools_overhead.py`.

A draft worker in a process of its own on loopback, models that take no time, batch 16, depth 7. A step's overhead is all
that `observe` and `collect` take, message building, round trip and draft assembly included. Between steps the target rests,
as it would verify; the worker drafts ahead in that time. CPU is the time the target's own thread works on it.
"""

import argparse
import statistics

from pools_fakes import VOCAB, VOCABULARY, decode, until_up, worker_process

from paceline.runtime.draft_link import DraftAddress
from paceline.runtime.keys import Security, generate
from paceline.runtime.pool_proposer import PoolProposer
from paceline.runtime.roster import DraftLimits


def measure(
    curve: bool, ahead_nodes: int, batch: int, steps: int, verify: float, alpha: float
) -> tuple[list[float], float]:
    server = client = None
    if curve:
        pair, own = generate(), generate()
        server, client = Security(pair, allowed=frozenset([own.public])), Security(own, server=pair.public)
    limits = DraftLimits(ahead_nodes=ahead_nodes, max_batch=256)
    with worker_process(alpha, 0.0, limits, server) as (address, _):
        proposer = PoolProposer([DraftAddress("draft-0", address, client)], VOCABULARY, VOCAB)
        until_up(proposer)
        run = decode(proposer, batch, steps, 7, verify)
        counts = proposer.snapshot().links[0].counts
        proposer.shut_down()
    return sorted(run.overheads), counts.ready / counts.rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--verify", type=float, default=0.015, help="seconds between steps")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    print(f"batch {args.batch}, depth 7, loopback, {args.steps} steps, best of {args.runs} runs by p50\n")
    print("| wire | drafts | p50 ms | p90 ms | p99 ms | ready |\n|---|---|---:|---:|---:|---:|")
    for curve in (False, True):
        for label, nodes, alpha in (("ahead, all accepted", 32, 1.0), ("on demand", 0, 1.0)):
            runs = [measure(curve, nodes, args.batch, args.steps, args.verify, alpha) for _ in range(args.runs)]
            times, ready = min(runs, key=lambda run: statistics.median(run[0]))
            at = [times[int(share * (len(times) - 1))] * 1e3 for share in (0.5, 0.9, 0.99)]
            name = "CURVE" if curve else "plain"
            print(f"| {name} | {label} | {at[0]:.2f} | {at[1]:.2f} | {at[2]:.2f} | {ready:.0%} |")


if __name__ == "__main__":
    main()

"""Cost of a draft pool per step: `python benchmarks/pools/pools_overhead.py`.

A draft worker in its own process on loopback, models that take no time, batch 16, depth 7. The overhead of a step is
the time of `observe` and `collect`: encoding, round trip and assembly of drafts. *Whole* adds the engine's work
around any proposer. Between steps the target sleeps for the time of a verification, and the worker drafts ahead. CPU
is the target thread's time in `observe` and `collect`, and all time of the worker's process per round.

`--apart` pins the two processes to different cores.
"""

import argparse
import multiprocessing
import os
import statistics
from pathlib import Path
from typing import NamedTuple

from pools_fakes import TOKENIZER, VOCAB, decode, until_up, worker_process

from paceline.drafting.connection import DraftAddress
from paceline.drafting.proposer import PoolProposer
from paceline.drafting.scheduler import DraftLimits
from paceline.wire.keys import Security, generate_key_pair

WARM = 50
CORES = sorted(os.sched_getaffinity(0))


class Measured(NamedTuple):
    times: list[float]
    whole: float
    cpu: float
    worker_cpu: float
    ready: float


def measure(
    curve: bool, max_branch_tokens: int, batch: int, steps: int, verify: float, apart: bool = False
) -> Measured:
    server = client = None
    if curve:
        pair, own = generate_key_pair(), generate_key_pair()
        server, client = Security(pair, allowed=frozenset([own.public])), Security(own, server=pair.public)
    limits = DraftLimits(max_branch_tokens=max_branch_tokens, max_batch=256)
    with worker_process(1.0, 0.0, limits, server) as (address, _):
        (worker,) = multiprocessing.active_children()
        assert worker.pid is not None
        proposer = PoolProposer([DraftAddress("draft-0", address, client)], TOKENIZER, VOCAB)
        until_up(proposer)
        if apart:
            pin(os.getpid(), {CORES[0]})
            pin(worker.pid, set(CORES[1:]))
        decode(proposer, batch, WARM, 7, verify)
        before = cpu_seconds(worker.pid)
        run = decode(proposer, batch, steps, 7, verify, first_seed=batch, warm=0)
        worker_cpu = (cpu_seconds(worker.pid) - before) / steps
        counts = proposer.connections[0].counters
        proposer.shut_down()
    whole, cpu = statistics.median(run.overheads), statistics.median(run.cpu)
    return Measured(sorted(run.pooled), whole, cpu, worker_cpu, counts.ready / counts.rounds)


def pin(pid: int, cores: set[int]) -> None:
    """All threads of a process."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--verify", type=float, default=0.015, help="seconds between steps")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--apart", action="store_true", help="pin target and worker to different cores")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    print(
        f"batch {args.batch}, depth 7, loopback, {args.steps} steps, best of {args.runs} runs by p50, load {load:.1f}\n"
    )
    print("| connection | drafts | p10 ms | p50 ms | p90 ms | whole p50 ms | target CPU ms | worker CPU ms | ready |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for curve in (False, True):
        for label, nodes in (("ahead, all accepted", 32), ("on demand", 0)):
            runs = [measure(curve, nodes, args.batch, args.steps, args.verify, args.apart) for _ in range(args.runs)]
            best = min(runs, key=lambda run: statistics.median(run.times))
            at = [best.times[int(share * (len(best.times) - 1))] * 1e3 for share in (0.1, 0.5, 0.9)]
            figures = [*at, best.whole * 1e3, best.cpu * 1e3, best.worker_cpu * 1e3]
            name = "CURVE" if curve else "plain"
            print(f"| {name} | {label} | {' | '.join(f'{figure:.2f}' for figure in figures)} | {best.ready:.0%} |")


if __name__ == "__main__":
    main()

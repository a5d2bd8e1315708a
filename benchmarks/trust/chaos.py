"""A cluster of processes under two faults at a time: no stream may be lost or different, and nothing may leak.

    make chaos                       # 30 minutes, 16 streams, models of random weights
    make chaos ARGS="--seed 7 --pairs 39 --model smollm2 --draft smollm2-distilled"

Two targets, a draft worker and a prefill worker behind a gateway process, and a proxy in front of each of them. Clients
stream over HTTP; a broken connection is continued with `Last-Event-ID`, or sent again where the server says so. Each
text is compared with plain decoding by the same gateway before the first fault. The seed decides faults, requests and
pauses. Prints a row for each pair of faults: the streams that it met, those lost and different, and their longest gap.
Exit status 1: a stream was lost or different, or something leaked.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import psutil
from chaos_cluster import (
    MemoryLog,
    document,
    leaks,
    local_cluster,
    mark,
    models,
    orphans,
    patch,
    shared_memory,
)
from chaos_faults import Event, Faults
from chaos_load import Results, Streams, cases, plain, send_poison

DRAIN_SECONDS = 1800.0
CHECK_PAIRS = 13
"""Pairs after which the cluster must be idle without load."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="of the targets; default: random weights")
    parser.add_argument("--draft", help="default: the model of the targets")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--pairs", type=int, default=1_000_000, help="end after so many pairs of faults")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pause", type=float, default=0.2, help="mean seconds between two streams of a client")
    parser.add_argument("--every", type=float, default=2.0, help="mean seconds between two pairs of faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", nargs="*", help="of these kinds only, such as 'kill gateway' or network")
    parser.add_argument("--folder", type=Path, help="keep models and logs in this new folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        failures = run(options, options.folder or Path(folder))
    for failure in failures:
        print(f"FAILED: {failure}")
    sys.exit(1 if failures else 0)


def run(options: argparse.Namespace, folder: Path) -> list[str]:
    """Runs the cluster under load and prints the report. Returns what must not happen and did."""
    shared, results, events = shared_memory(), Results(), list[Event]()
    mark(folder)
    clock, read_only = patch(folder)
    target, draft, _ = models(folder / "models")
    config = document(folder, options.model or target, options.draft or options.model or draft)
    with local_cluster(config, folder) as cluster:
        expected = {case: plain(cluster.metrics_url, case) for case in cases(options.seed, 12, options.tokens)}
        faults = Faults(options.seed, cluster, clock, read_only, lambda rng: send_poison(cluster.url, rng, results))
        if options.faults:
            faults.keep(options.faults)
        rng, began = random.Random(options.seed), time.monotonic()
        end, failures = began + 60 * options.minutes, list[str]()
        with MemoryLog(cluster.pids) as memory:
            while time.monotonic() < end and len(events) < options.pairs:
                seed = f"{options.seed}-{len(events)}"
                streams = Streams(cluster.url, expected, results, options.streams, seed, options.pause)
                for _ in range(min(CHECK_PAIRS, options.pairs - len(events))):
                    time.sleep(rng.expovariate(1 / options.every))
                    events.append(faults.make())
                    print(f"{events[-1].start - began:8.1f}  {events[-1].where}", flush=True)
                streams.join(DRAIN_SECONDS)
                cluster.wait_ready(cluster.names)
                failures += cluster.leaks()
                found = [*results.lost, *results.different, *failures]
                print(
                    f"{len(events)} pairs, {len(results.spans)} streams, {len(found)} failures",
                    *found,
                    sep="\n",
                    flush=True,
                )
        seconds = time.monotonic() - began
    failures += [*results.lost, *results.different, *leaks(orphans)]
    failures += [f"shared memory {name}" for name in shared_memory() - shared]
    _report(options, results, events, seconds)
    print("\n".join(memory.table([seconds / 3, seconds])))
    return failures


def _report(options: argparse.Namespace, results: Results, events: list[Event], seconds: float) -> None:
    print(
        f"\n{len(events)} pairs of faults, {options.streams} streams at a time, seed {options.seed}, {seconds:.0f} s, "
        f"load average {psutil.getloadavg()[2]:.0f}\n"
    )
    print("| streams | tokens | resumed | sent again | refused | lost | different | longest gap |")
    print("|---|---|---|---|---|---|---|---|")
    print(
        f"| {len(results.spans)} | {results.tokens} | {results.resumed} | {results.resent} | {results.refused} "
        f"| {len(results.lost)} | {len(results.different)} | {results.longest_gap():.1f} s |\n"
    )
    print("| faults | times | streams | lost | different | longest gap |")
    print("|---|---|---|---|---|---|")
    rows = defaultdict[str, list[Event]](list)
    for event in events:
        rows[" and ".join(event.pair)].append(event)
    for name, met in sorted(rows.items()):
        outcomes = Counter(
            span.outcome
            for span in results.spans
            if any(span.start < event.end and span.end > event.start for event in met)
        )
        gap = max(results.longest_gap(event.start, event.end) for event in met)
        counts = f"{outcomes.total()} | {outcomes['lost']} | {outcomes['different']}"
        print(f"| {name} | {len(met)} | {counts} | {gap:.1f} s |", flush=True)


if __name__ == "__main__":
    main()

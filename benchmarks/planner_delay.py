"""What knowledge of the future is worth on a trace: sizes with and without it, in the fluid queue of `planner_oracle.py`.

    python benchmarks/planner_delay.py TRACE [--scale 4] [--fixed 7] [--fixed-share 0.9575] [--share 0.9322]

Every row is the least cost found at the attainment `--share`, with the same start-up time, interval and payments. Where no
schedule has just this attainment, it is a mixture of two:

- `oracle`: sizes from the whole trace, by dynamic programming;
- `table`: sizes by the load of the past only. The past is a state (load of the last 10, 60 and 300 s, in classes), and the
  table has a size for each state. A local search chooses them on this very trace, which no planner knows beforehand;
- `fixed`: one size all the time.

A worker that is added at a decision is paid at once and ready after the start-up time; one that is removed leaves at once.
`--fixed` and `--fixed-share` are the attainment of a fixed size in the simulator (`autoscaling.py`): they calibrate the queue.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from planner_oracle import DRAIN_SECONDS, STEP, FluidLoad, fluid_load, missed, ready_sizes

from paceline.planning.profiles.profile_file import load_profile
from paceline.planning.traces.trace_file import load_trace

WINDOWS = (1, 6, 30)
"""Decisions back that a state sees."""
CLASSES = (3, 4, 4)
PRICES, PASSES = 7, 3
"""Prices of a miss that a search tries, and passes over the table at each."""


Cost = tuple[float, float]
"""Paid worker seconds, and requests that miss the objective."""


class Queue:
    """The fluid queue of a trace with sizes that were decided every `STEP` seconds."""

    def __init__(self, load: FluidLoad, ttft: float, speed: float, start_seconds: float) -> None:
        self._work, self._requests = load.work.tolist(), load.requests.tolist()
        self.load, self.ttft, self.speed, self.start_seconds = load, ttft, speed, start_seconds
        self._delay = math.ceil(start_seconds / STEP)
        self.total = float(load.requests.sum())

    def cost(self, coming: Sequence[int]) -> Cost:
        """The cost if `coming` workers serve or start in each step."""
        paid, misses, backlog = float(coming[0]) * STEP, 0.0, 0.0
        for step, size in enumerate(coming):
            if step:
                paid += STEP * size + DRAIN_SECONDS * max(0, coming[step - 1] - size)
            rate = self.speed * min(coming[max(0, step - self._delay) : step + 1])
            for second in range(step * STEP, (step + 1) * STEP):
                work = self._work[second]
                if work:
                    late = (backlog + work) / rate - self.ttft
                    if late > 0.0:
                        misses += self._requests[second] * min(1.0, late)
                    backlog += work
                backlog = backlog - rate if backlog > rate else 0.0
        return paid, misses


def states(load: FluidLoad) -> list[int]:
    """State of the past at each decision."""
    work = load.work.reshape(-1, STEP).sum(axis=1)
    sums = np.concatenate([[0.0], np.cumsum(work)])
    found = np.zeros(len(work), dtype=int)
    for window, classes in zip(WINDOWS, CLASSES, strict=True):
        ends = np.arange(len(work))  # a decision sees the steps before it
        past = sums[ends] - sums[np.maximum(0, ends - window)]
        limits = np.quantile(past, np.linspace(0.0, 1.0, classes + 1)[1:-1])
        found = found * classes + np.searchsorted(limits, past, side="right")
    return [int(one) for one in found]


def best_table(
    queue: Queue, past: Sequence[int], price: float, most: int, last: dict[int, int] | None
) -> dict[int, int]:
    """A table of which no single entry can be improved, nor all entries below or above a size together. The search starts from
    the best single size, or from the table of another price."""

    def total(one: dict[int, int]) -> float:
        paid, misses = queue.cost([one[state] for state in past])
        return paid + price * misses

    known, sizes = sorted(set(past)), range(1, most + 1)
    starts = [dict.fromkeys(known, size) for size in sizes] + ([last] if last is not None else [])
    least, table = min(((total(one), one) for one in starts), key=lambda two: two[0])
    for _ in range(PASSES):
        before = least
        moves: list[Callable[[dict[int, int]], dict[int, int]]] = []
        for size in sizes:
            moves += (partial(_bounded, max, size), partial(_bounded, min, size))
            moves += (partial(_with, state, size) for state in known)
        for move in moves:
            changed = move(table)
            if changed != table and (value := total(changed)) < least:
                table, least = changed, value
        if least == before:
            break
    return table


def _bounded(rule: Callable[[int, int], int], limit: int, table: dict[int, int]) -> dict[int, int]:
    return {state: rule(size, limit) for state, size in table.items()}


def _with(state: int, size: int, table: dict[int, int]) -> dict[int, int]:
    return {**table, state: size}


def schedules(queue: Queue, share: float, sizes_at: Callable[[float], list[int]]) -> list[Cost]:
    """Costs of the schedules of several prices around the one that reaches the share."""
    low, high, found = 0.02, 200.0, []
    for _ in range(PRICES):
        price = math.sqrt(low * high)
        found.append(queue.cost(sizes_at(price)))
        low, high = (low, price) if found[-1][1] <= (1.0 - share) * queue.total else (price, high)
    return found


def mixed(costs: Sequence[Cost], misses: float) -> float:
    """Least paid time with so many misses: of one schedule, or of two of which each is used for a part of many such traces."""
    least = min((paid for paid, some in costs if some <= misses), default=math.inf)
    for less, many in costs:
        for more, few in costs:
            if few < misses < many:
                part = (many - misses) / (many - few)
                least = min(least, less + part * (more - less))
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--ttft-ms", type=float, default=1000.0)
    parser.add_argument("--share", type=float, default=0.9322, help="attainment at which costs are compared")
    parser.add_argument("--fixed", type=int, default=7)
    parser.add_argument(
        "--fixed-share", type=float, default=0.9575, help="attainment of this fixed size in the simulator"
    )
    parser.add_argument("--most", type=int, default=16, help="largest size")
    parser.add_argument("--profile", default="h200-8b")
    options = parser.parse_args()
    profile, ttft = load_profile(options.profile), options.ttft_ms / 1e3
    load = fluid_load(profile, load_trace(options.trace).scaled(options.scale))
    low, high = 0.2, 2.0
    for _ in range(12):
        speed = (low + high) / 2.0
        enough = missed(load, [options.fixed], ttft, speed) <= (1.0 - options.fixed_share) * load.requests.sum()
        low, high = (low, speed) if enough else (speed, high)
    start = profile.start_seconds.value
    queue, past = Queue(load, ttft, high, start), states(load)
    early = math.ceil(start / STEP)

    def oracle(price: float) -> list[int]:
        ready = ready_sizes(load, ttft, high, options.most, start, price)
        return [max(ready[step : step + early + 1]) for step in range(len(ready))]

    table: dict[int, int] | None = None

    def by_table(price: float) -> list[int]:
        nonlocal table
        table = best_table(queue, past, price, options.most, table)
        return [table[state] for state in past]

    fixed = [queue.cost([size] * len(past)) for size in range(1, options.most + 1)]
    tables = schedules(queue, options.share, by_table)
    rows = {
        "oracle": [*schedules(queue, options.share, oracle), *fixed],
        "table": [*tables, *fixed],
        "fixed": fixed,
    }
    hours = {name: mixed(costs, (1.0 - options.share) * queue.total) / 3600.0 for name, costs in rows.items()}
    print(f"{load.requests.sum():.0f} requests, {len(set(past))} states, speed {high:.3f}")
    print("| sizes | worker hours | of the oracle |")
    print("|---|---|---|")
    for name, paid in hours.items():
        print(f"| {name} | {paid:.2f} | {paid / hours['oracle']:.2f} |")


if __name__ == "__main__":
    main()

"""The planner next to an oracle, a fixed size and two autoscalers, in the simulator.

python benchmarks/planner/autoscaling.py TRACE [--scale 4] [--ttft-ms 1000] [--tpot-ms 30] [--share 0.95] [--rotate 900]

All of them scale target workers with the start-up time of the profile and the same limit. Each is compared, at the attainment
that it reached, with two that know the trace: the oracle (`planner_oracle.py`), and the fixed sizes around that attainment. The
oracle is the cheaper of the two. `perfect forecast` is the planner with the true load of the next minutes.
"""

import argparse
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from planner_oracle import FluidLoad, as_schedule, fluid_load, missed, ready_sizes
from rules import FixedSize, QueueThreshold, TimetableRule, UtilisationTarget

from paceline.planning.observation import Controller
from paceline.planning.planner.forecast import Prediction
from paceline.planning.planner.planner import HOLD_SECONDS, Planner, PlannerConfig
from paceline.planning.planner.replay import TrafficSpan
from paceline.planning.planner.sizing import ClusterLimits
from paceline.planning.profile import WorkerProfile, load_profile
from paceline.planning.simulator.result import Objective, summarize
from paceline.planning.simulator.settings.config import SimulationConfig
from paceline.planning.simulator.simulation import Scaling, simulate
from paceline.planning.traces.trace import Trace, ordered
from paceline.planning.traces.trace_files import load_trace

PRICES = 6
"""Prices of a miss that the search for a schedule tries."""


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    dollars: float
    attainment: float
    largest: int
    turns: int
    """Changes of direction of the size."""
    lost: int


class Case:
    def __init__(self, profile: WorkerProfile, trace: Trace, objective: Objective, most: int) -> None:
        self.profile, self.trace, self.objective, self.most = profile, trace, objective, most
        self._fixed: dict[int, Outcome] = {}
        self._speed: float | None = None

    def run(self, name: str, controller: Controller, start: int) -> Outcome:
        config = SimulationConfig(self.profile, start)
        result = simulate(config, self.trace, Scaling(controller, self.objective))
        report = summarize(result, self.objective)
        sizes = [size.workers["target"] for size in result.sizes]
        steps = [after - before for before, after in pairwise(sizes) if after != before]
        turns = sum((before > 0) != (after > 0) for before, after in pairwise(steps))
        lost = len(self.trace.requests) - len(result.jobs) - result.rejected
        return Outcome(name, result.dollars, report.attainment, max(sizes), turns, lost)

    def cheapest_schedule(self, share: float) -> Outcome | None:
        """The cheapest schedule found by dynamic programming that reaches the share. None if none does."""
        best, low, high = None, 0.05, 20.0
        load = fluid_load(self.profile, self.trace)
        start_seconds = self.profile.start_seconds.value
        for _ in range(PRICES):
            price = math.sqrt(low * high)
            ready = ready_sizes(load, self.objective.ttft, self.speed(load), self.most, start_seconds, price)
            sizes = as_schedule(ready, start_seconds)
            found = self.run(f"oracle, {price:.2f} a miss", TimetableRule(sizes), sizes[0][1])
            if found.attainment >= share:
                high = price
                if best is None or found.dollars < best.dollars:
                    best = found
            else:
                low = price
        return best

    def speed(self, load: FluidLoad) -> float:
        """Work that a worker does in a second, so that the fluid queue misses as much as the smallest fixed size does."""
        if self._speed is None:
            size, fixed = self.fixed(self.objective.share)
            misses, low, high = (1.0 - fixed.attainment) * len(self.trace.requests), 0.2, 2.0
            for _ in range(12):
                middle = (low + high) / 2.0
                enough = missed(load, [size], self.objective.ttft, middle) <= misses
                low, high = (low, middle) if enough else (middle, high)
            self._speed = high
        return self._speed

    def fixed(self, share: float) -> tuple[int, Outcome]:
        """The smallest fixed size that reaches the share."""
        for size in range(1, self.most + 1):
            if size not in self._fixed:
                self._fixed[size] = self.run(f"fixed, {size}", FixedSize(size), size)
            if self._fixed[size].attainment >= share:
                break
        return size, self._fixed[size]

    def mixed_fixed(self, share: float) -> float:
        """Dollars of the fixed sizes around a share, interpolated: one of them for part of the time, then the other."""
        size, above = self.fixed(share)
        below = self._fixed.get(size - 1)
        if below is None or above.attainment <= below.attainment:
            return above.dollars
        part = (share - below.attainment) / (above.attainment - below.attainment)
        return below.dollars + min(1.0, max(0.0, part)) * (above.dollars - below.dollars)


class PerfectForecast(Planner):
    """The planner with the true load until a worker that starts now has served for as long as it took to start."""

    def __init__(self, config: PlannerConfig, trace: Trace) -> None:
        super().__init__(config)
        self._arrivals = [request.arrival for request in trace.requests]

    def scenario(self, now: float, predicted: Prediction) -> list[TrafficSpan]:
        ends = [now + self.interval * step for step in range(2 * self.horizon + 1)]
        counts = [bisect_left(self._arrivals, end) for end in ends]
        return [TrafficSpan((after - before) / self.interval, self.interval) for before, after in pairwise(counts)]


def rotated(trace: Trace, seconds: float) -> Trace:
    """The trace from `seconds` on, then what came before."""
    whole = trace.seconds + 1.0
    return ordered(
        trace.name,
        [replace(request, arrival=(request.arrival - seconds) % whole) for request in trace.requests],
        trace.block_tokens,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--ttft-ms", type=float, default=1000.0)
    parser.add_argument("--tpot-ms", type=float, default=30.0)
    parser.add_argument("--share", type=float, default=0.95)
    parser.add_argument("--max-workers", type=int, default=32)
    parser.add_argument("--profile", default="h200-8b")
    parser.add_argument(
        "--rotate", type=float, default=0.0, help="start the trace at this time, and append what is before"
    )
    parser.add_argument("--only", action="append", help="run only this controller, such as planner; may be repeated")
    parser.add_argument(
        "--hold", type=float, default=HOLD_SECONDS, help="seconds of past load that the planner sizes for"
    )
    parser.add_argument("--start", type=int, help="workers at the start; default: half of the best fixed size")
    options = parser.parse_args()
    profile = load_profile(options.profile)
    trace = load_trace(options.trace).first(options.seconds).scaled(options.scale)
    trace = rotated(trace, options.rotate)
    objective = Objective(options.ttft_ms / 1e3, options.tpot_ms / 1e3, options.share)
    case = Case(profile, trace, objective, options.max_workers)
    print(f"{trace.name}: {len(trace.requests)} requests in {trace.seconds:.0f} s; {objective}", flush=True)
    planning = PlannerConfig(profile, objective, ClusterLimits(options.max_workers), hold=options.hold)
    makers: dict[str, Callable[[], Controller]] = {
        "planner": lambda: Planner(planning),
        "perfect forecast": lambda: PerfectForecast(planning, trace),
        "queue threshold": lambda: QueueThreshold(options.max_workers),
        "utilisation 60%": lambda: UtilisationTarget(options.max_workers),
    }
    if options.only:
        makers = {name: makers[name] for name in options.only}
    size, fixed = case.fixed(objective.share)
    runs = {
        "fixed": fixed,
        **{name: case.run(name, make(), options.start or size // 2 + 1) for name, make in makers.items()},
    }
    print("| | dollars | attainment | oracle | of it | fixed | of it | most | turns | lost |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for outcome in runs.values():
        oracle = case.cheapest_schedule(outcome.attainment)
        mixed = case.mixed_fixed(outcome.attainment)
        least = min(mixed, oracle.dollars if oracle is not None else mixed)
        print(
            f"| {outcome.name} | {outcome.dollars:.2f} | {outcome.attainment:.2%} | {least:.2f} "
            f"| {outcome.dollars / least:.2f} | {mixed:.2f} | {outcome.dollars / mixed:.2f} "
            f"| {outcome.largest} | {outcome.turns} | {outcome.lost} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

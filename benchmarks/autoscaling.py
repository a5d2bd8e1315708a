"""The planner beside an oracle, a fixed size and two autoscalers, in the simulator.

python benchmarks/autoscaling.py TRACE [--scale 4] [--seconds 1800] [--ttft-ms 1000] [--tpot-ms 30] [--share 0.95]

All of them scale target workers with the start-up time of the profile and the same limit. The oracle knows the trace: it takes
the cheapest of fixed sizes and of schedules that follow the future load, in steps of a minute, that reaches the share.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from paceline.planning.autoscaling.observation import Controller
from paceline.planning.autoscaling.planner import Planner, PlannerConfig
from paceline.planning.autoscaling.rules import FixedSize, QueueThreshold, Schedule, UtilisationTarget
from paceline.planning.profiles.profile import WorkerProfile
from paceline.planning.profiles.profile_file import load_profile
from paceline.planning.simulation.config import SimulationConfig
from paceline.planning.simulation.objective import Objective
from paceline.planning.simulation.result import summarize
from paceline.planning.simulation.simulation import Scaling, simulate
from paceline.planning.sizing.candidate import Limits
from paceline.planning.traces.trace import Trace
from paceline.planning.traces.trace_file import load_trace

WINDOW = 60.0
"""Seconds of a step of the oracle's schedule."""


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

    def run(self, name: str, controller: Controller, start: int) -> Outcome:
        config = SimulationConfig(self.profile, start)
        result = simulate(config, self.trace, Scaling(controller, self.objective))
        report = summarize(result, self.objective)
        sizes = [size.workers["target"] for size in result.sizes]
        steps = [after - before for before, after in pairwise(sizes) if after != before]
        turns = sum((one > 0) != (other > 0) for one, other in pairwise(steps))
        lost = len(self.trace.requests) - len(result.jobs) - result.rejected
        return Outcome(name, result.dollars, report.attainment, max(sizes), turns, lost)

    def smallest_fixed(self) -> tuple[int, Outcome]:
        """The smallest fixed size that reaches the share, by bisection."""
        low, high, best = 1, self.most, None
        while low <= high:
            middle = (low + high) // 2
            found = self.run(f"fixed, {middle}", FixedSize(middle), middle)
            if found.attainment >= self.objective.share:
                best, high = (middle, found), middle - 1
            else:
                low = middle + 1
        return best if best is not None else (self.most, self.run("fixed", FixedSize(self.most), self.most))

    def work(self) -> list[float]:
        """Seconds of work that arrive in each window, by the profile's passes; prefixes are not cached."""
        windows = [0.0] * (int(self.trace.seconds // WINDOW) + 1)
        row = self.profile.pass_seconds.at(512) / 512
        decode = self.profile.verify_seconds(32, 0, 32 * 2000) / 32
        for one in self.trace.requests:
            windows[int(one.arrival // WINDOW)] += one.prompt_tokens * row + one.output_tokens * decode
        return windows

    def schedule(self, factor: float) -> list[tuple[float, int]]:
        """Sizes for `factor` times the work, started early by the start-up time."""
        early = self.profile.start_seconds.value + 10.0
        loads = self.work()
        sizes = []
        for number, load in enumerate(loads):
            ahead = max(load, loads[number + 1] if number + 1 < len(loads) else load)
            sizes.append((number * WINDOW - early, min(self.most, max(1, math.ceil(factor * ahead / WINDOW)))))
        return sizes

    def oracle(self, fixed: Outcome) -> Outcome:
        """The cheapest schedule that reaches the share, or the fixed size."""
        best, low, high = fixed, 0.5, 8.0
        for _ in range(6):
            factor = math.sqrt(low * high)
            schedule = self.schedule(factor)
            found = self.run(f"oracle, {factor:.2f} x work", Schedule(schedule), schedule[0][1])
            if found.attainment >= self.objective.share:
                high = factor
                if found.dollars < best.dollars:
                    best = found
            else:
                low = factor
        return best


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
    parser.add_argument("--only", help="run only this controller, such as planner, with --start workers; or oracle")
    parser.add_argument("--start", type=int, default=4)
    options = parser.parse_args()
    profile = load_profile(options.profile)
    trace = load_trace(options.trace).first(options.seconds).scaled(options.scale)
    objective = Objective(options.ttft_ms / 1e3, options.tpot_ms / 1e3, options.share)
    case = Case(profile, trace, objective, options.max_workers)
    print(f"{trace.name}: {len(trace.requests)} requests in {trace.seconds:.0f} s; {objective}", flush=True)
    limits = Limits(options.max_workers)
    makers: dict[str, Callable[[], Controller]] = {
        "planner": lambda: Planner(PlannerConfig(profile, objective, limits)),
        "queue threshold": lambda: QueueThreshold(options.max_workers),
        "utilisation 60%": lambda: UtilisationTarget(options.max_workers),
    }
    if options.only == "oracle":
        fixed = case.smallest_fixed()[1]
        print(case.oracle(fixed), fixed, sep="\n")
        return
    if options.only is not None:
        print(case.run(options.only, makers[options.only](), options.start))
        return
    size, fixed = case.smallest_fixed()
    oracle = case.oracle(fixed)
    start = size // 2 + 1
    print("| | dollars | of the oracle | requests in the objective | most workers | changes of direction | lost |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for one in (oracle, fixed, *(case.run(name, make(), start) for name, make in makers.items())):
        print(
            f"| {one.name} | {one.dollars:.2f} | {one.dollars / oracle.dollars:.2f} | {one.attainment:.2%} "
            f"| {one.largest} | {one.turns} | {one.lost} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""Speed and memory of the simulator on a scaled trace, and the closed form against steps one by one.

    python benchmarks/planner/simulator_speed.py TRACE --workers 125 --profile 70b-8xh200 --scale 16
    python benchmarks/planner/simulator_speed.py TRACE --workers 1000 --scale 200 --seconds 20
    python benchmarks/planner/simulator_speed.py TRACE --workers 8 --seconds 600 --compare

`make compiled` compiles the router and the simulator; PYTHONPATH=build/compiled runs them.

`70b-8xh200` is a roofline of eight H200 that serve one 70B model: 1,000 GPUs are 125 such workers. With `h200-8b` every GPU is
a worker of its own.
"""

import argparse
import resource
import time
from dataclasses import replace
from itertools import chain
from math import sqrt
from pathlib import Path
from statistics import fmean, pvariance

from paceline.planning.profile import ProfileCurve, ProfileValue, WorkerProfile, load_profile
from paceline.planning.simulator import simulation
from paceline.planning.simulator.result import Objective, SimulationReport, quantile, summarize
from paceline.planning.simulator.settings.config import Mode, SimulationConfig, Speculation
from paceline.planning.simulator.simulation import simulate
from paceline.planning.traces.trace import Trace
from paceline.planning.traces.trace_files import load_trace

ROOFLINE = "70b-8xh200"
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
PARAMETERS = 70e9


def assumed(value: float) -> ProfileValue:
    return ProfileValue(value, "assumed", "benchmarks/planner/simulator_speed.py")


def roofline(name: str, gpus: int, bandwidth: float, flops: float, price: float, draft_ms: float) -> WorkerProfile:
    """A 70B target with 8-bit weights, at 70% of the bandwidth and 60% of the arithmetic of each GPU, both per second."""
    reading = PARAMETERS / (gpus * bandwidth * 0.7)
    row = 2.0 * PARAMETERS / (gpus * flops * 0.6)
    points = tuple((rows, max(reading, rows * row)) for rows in ROWS)
    return replace(
        load_profile("h200-8b"),
        name=name,
        pass_seconds=ProfileCurve(points, "assumed"),
        prompt_seconds=None,
        context_seconds=assumed(327_680 / (gpus * bandwidth * 0.7)),
        prompt_context_seconds=assumed(0.0),
        draft_seconds=ProfileCurve(((1, draft_ms / 1e3), (64, draft_ms / 1e3)), "assumed"),
        draft_prefill_seconds=assumed(0.0),
        price_per_hour=assumed(price),
        max_num_seqs=assumed(256),
        kv_tokens=assumed(400_000),
    )


def profile(name: str) -> WorkerProfile:
    if name != ROOFLINE:
        return load_profile(name)
    # 4.8 TB/s and 989 TFLOP/s a GPU; 90% of 8 x 141 GB, less 80 GB of weights and workspace, for 328 kB a token
    return replace(
        roofline(name, 8, 4.8e12, 989e12, 8 * 2.69, 1.0),
        kv_tokens=assumed(2.85e6),
        prompt_context_seconds=assumed(6.6e-10),
    )


def run(
    options: argparse.Namespace, trace: Trace, mode: Mode, seed: int
) -> tuple[SimulationReport, float, list[float]]:
    """The report, the seconds of CPU time that it took, and the TPOT of every request."""
    speculation = Speculation((options.alpha,), spread=options.alpha_spread) if options.alpha else None
    config = SimulationConfig(profile(options.profile), options.workers, speculation=speculation, mode=mode, seed=seed)
    started = time.process_time()
    result = simulate(config, trace)
    seconds = time.process_time() - started
    return summarize(result, Objective()), seconds, [job.tpot for job in result.jobs if job.output_tokens > 1]


def figures(report: SimulationReport) -> dict[str, float]:
    return {
        "TTFT mean, ms": 1000.0 * report.ttft.mean,
        "TTFT p99, ms": 1000.0 * report.ttft.p99,
        "TPOT mean, ms": 1000.0 * report.tpot.mean,
        "TPOT p50, ms": 1000.0 * report.tpot.p50,
        "TPOT p99, ms": 1000.0 * report.tpot.p99,
        "tokens/s": report.tokens_per_second,
        "utilisation": report.utilisation,
        "hit rate": report.hit_rate,
        "steps": float(report.steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--profile", default="h200-8b", help=f"name, file, or {ROOFLINE}")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="part of the trace")
    parser.add_argument("--alpha", type=float, default=0.8, help="0: no drafts")
    parser.add_argument("--alpha-spread", type=float, default=0.0, help="deviation over texts of the log-odds")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each mode, with --compare")
    parser.add_argument("--compare", action="store_true", help="compare with steps one by one")
    options = parser.parse_args()
    trace = load_trace(options.trace).first(options.seconds).scaled(options.scale)
    if not options.compare:
        started = time.perf_counter()
        report, seconds, _ = run(options, trace, "closed_form", 0)
        wall = time.perf_counter() - started
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        kind = "Python" if simulation.__file__.endswith(".py") else "compiled"
        print(f"{report.requests} requests, {options.workers} workers, {report.seconds:.0f} s of virtual time, {kind}")
        print(
            f"{wall:.1f} s, {seconds:.1f} s of CPU time, {1e6 * seconds / report.requests:.0f} us a request, {memory:.0f} MiB"
        )
        for name, value in figures(report).items():
            print(f"{name:16}{value:12.4g}")
        return
    modes: tuple[Mode, Mode] = ("closed_form", "stepwise")
    runs = [[run(options, trace, mode, seed) for seed in range(options.seeds)] for mode in modes]
    closed, steps = ([figures(report) for report, _, _ in some] for some in runs)
    for name in closed[0]:
        columns = [[seed[name] for seed in seeds] for seeds in (closed, steps)]
        means = [fmean(column) for column in columns]
        ratio = means[0] / means[1] if means[1] else 1.0
        error = sqrt(sum(pvariance(column) for column in columns) / max(1, options.seeds - 1)) / (means[1] or 1.0)
        spread = f"{min(columns[1]):.4g} to {max(columns[1]):.4g}"
        print(
            f"{name:16}{means[0]:12.4g}{means[1]:12.4g}  ratio {ratio:.4f} +- {error:.4f}  stepwise {spread}",
            flush=True,
        )
    if options.seeds > 1:
        pooled = [[tpots for _, _, tpots in some] for some in runs]
        print(f"p99 of the TPOT of all seeds together: {pooled_ratio(pooled)}")


def pooled_ratio(pooled: list[list[list[float]]]) -> str:
    """The ratio of the p99 of all requests of all seeds, with the standard error of a jackknife over the seeds. The p99 of one
    run is that of a few requests; this one is that of a few for each seed."""

    def ratio(without: int) -> float:
        closed, other = (
            quantile(sorted(chain.from_iterable(some[:without] + some[without + 1 :])), 0.99) for some in pooled
        )
        return closed / other

    count = len(pooled[0])
    parts = [ratio(seed) for seed in range(count)]
    error = sqrt((count - 1) / count * sum((part - fmean(parts)) ** 2 for part in parts))
    return f"ratio {ratio(count):.4f} +- {error:.4f}"


if __name__ == "__main__":
    main()

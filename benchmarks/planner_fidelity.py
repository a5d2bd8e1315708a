"""The same trace on a real worker and in the simulator.

    python benchmarks/planner_fidelity.py all FOLDER                # about nine minutes on two quiet cores
    python benchmarks/planner_fidelity.py report FOLDER             # the tables again, from the files in the folder

`all` measures a profile on core 0 (worker.json), then starts a cluster of one target worker with one thread on core 0; the
gateway and this client run on core 1. Every request arrives at its time (open loop). It runs the traffic of the fit first
(fit.jsonl), then every rate `--repeats` times (runs.jsonl), and prints each run as it ends, with the load average. A second
`all` with the same folder keeps the profile and the fit, and adds runs.

The report simulates the same traces with the profile as measured, and with the profile fitted to the runs of fit.jsonl, at
another rate and with other prompts: a factor on all times by the mean TPOT, and the difference in mean TTFT for the gateway.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from planner_live import KEY, _until_ready
from planner_load import Arrival, random_prompts, replay

from paceline.planning.profiles.profile import WorkerProfile
from paceline.planning.profiles.profile_file import load_profile
from paceline.planning.simulation.config import SimulationConfig
from paceline.planning.simulation.result import Quantiles
from paceline.planning.simulation.simulation import simulate
from paceline.planning.traces.trace import Trace, TraceRequest
from paceline.runtime.deploy.deployment import free_address

FIT_ROUNDS = 4
LIMITS = {"max_num_seqs": 8, "max_model_len": 512, "kv_tokens": 8192}
PROMPTS, OUTPUTS = (16, 24, 32, 48), (8, 12, 16, 24)
VOCABULARY = 49_000
WORKER_CORE, GATEWAY_CORE = 0, 1
RATES = (2.5, 3.5, 4.5)
PACELINE = (sys.executable, "-m", "paceline")
Runs = dict[tuple[float, int], list[dict[str, float]]]
"""Figures of the runs, by requests per second and number of requests."""


def arrivals(rate: float, requests: int) -> list[Arrival]:
    dice, now, made = random.Random(f"fidelity/{rate}"), 0.0, []
    for prompt in random_prompts(requests, PROMPTS, VOCABULARY, seed=round(1000 * rate)):
        made.append(Arrival(now, prompt, dice.choice(OUTPUTS)))
        now += dice.expovariate(rate)
    return made


def measure(options: argparse.Namespace) -> None:
    """Everything that is measured, then the report."""
    options.folder.mkdir(parents=True, exist_ok=True)
    profile, fit, runs = (options.folder / name for name in ("worker.json", "fit.jsonl", "runs.jsonl"))
    if not profile.exists():
        command = ["taskset", "-c", str(WORKER_CORE), *PACELINE, "profile", str(profile), "--model", options.model]
        for name, value in LIMITS.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        subprocess.run(command, check=True)
    with cluster(options.model) as url:
        replay(url, [Arrival(0.3 * i, one, 8) for i, one in enumerate(random_prompts(6, PROMPTS, VOCABULARY, 1))])
        if not fit.exists():
            run(url, options.fit_rate, options.requests, fit)
        for _ in range(options.repeats):
            for rate in options.rate or RATES:
                run(url, rate, options.requests, runs)
    report(options)


@contextmanager
def cluster(model: str) -> Iterator[str]:
    """The address of the gateway of a cluster of one target worker."""
    pool = {"name": "target", "role": "target", "model": model, "devices": ["cpu"], "limits": LIMITS}
    pool |= {"audit_fraction": 0.0, "speculation": {"enabled": False}}
    gateway = {"max_waiting": 1000, "log_requests": "none", "log_level": "warning"}
    with tempfile.TemporaryDirectory(prefix="fidelity-") as name:
        file = Path(name) / "cluster.yaml"
        document = {"name": "fidelity", "state_dir": f"{name}/state", "health": {"canary": 0.0}}
        file.write_text(json.dumps({**document, "gateway": gateway, "pools": [pool]}))  # JSON is YAML
        port = free_address().rpartition(":")[2]
        url = f"http://127.0.0.1:{port}"
        subprocess.run(
            ["taskset", "-c", str(WORKER_CORE), *PACELINE, "up", str(file)], check=True, stdout=subprocess.DEVNULL
        )
        os.sched_setaffinity(0, {GATEWAY_CORE})
        serve = [*PACELINE, "serve", "--config", str(file), "--port", port]
        with subprocess.Popen(
            serve, stdout=subprocess.DEVNULL, env={**os.environ, "PACELINE_ADMIN_KEY": KEY}
        ) as server:
            try:
                _until_ready(url)
                yield url
            finally:
                server.terminate()
                subprocess.run([*PACELINE, "down", str(file)], check=True, stdout=subprocess.DEVNULL)


def run(url: str, rate: float, requests: int, file: Path) -> None:
    """Replay the trace of a rate, and add a line to the file."""
    answers = replay(url, arrivals(rate, requests))
    failed = [one.error for one in answers if one.error]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, the first with {failed[0]}")
    record: dict[str, object] = {"rate": rate, "requests": requests, "load": os.getloadavg()[0]}
    record |= {"ttft": [one.ttft for one in answers], "tpot": [one.tpot for one in answers]}
    record |= {"tokens": sum(len(one.tokens) for one in answers), "seconds": max(one.last for one in answers)}
    with file.open("a") as lines:
        lines.write(json.dumps(record) + "\n")
    shown = ", ".join(f"{name} {value:.4g}" for name, value in figures(record).items())
    print(f"{file.stem}: {rate:g} requests/s: {shown}; load average {os.getloadavg()[0]:.1f}", flush=True)


def figures(record: dict[str, object]) -> dict[str, float]:
    ttft, tpot = (Quantiles.of(record[name]) for name in ("ttft", "tpot"))  # type: ignore[arg-type]
    return {
        "TTFT mean, ms": 1e3 * ttft.mean,
        "TTFT p99, ms": 1e3 * ttft.p99,
        "TPOT mean, ms": 1e3 * tpot.mean,
        "TPOT p99, ms": 1e3 * tpot.p99,
        "tokens/s": record["tokens"] / record["seconds"],  # type: ignore[operator]
    }


def simulated(profile: WorkerProfile, rate: float, count: int, gateway: float) -> dict[str, float]:
    """Figures of the same trace in the simulator; `gateway`: seconds that are added to every TTFT."""
    requests = tuple(TraceRequest(one.time, len(one.prompt), one.output_tokens) for one in arrivals(rate, count))
    config = SimulationConfig(profile, 1, router="least_loaded", mode="stepwise")
    result = simulate(config, Trace("fidelity", requests))
    jobs = result.jobs
    record = {"ttft": [job.ttft + gateway for job in jobs], "tpot": [job.tpot for job in jobs]}
    return figures({**record, "tokens": sum(job.output_tokens for job in jobs), "seconds": result.seconds + gateway})


def scaled(profile: WorkerProfile, factor: float) -> WorkerProfile:
    """The profile with all times of the target multiplied."""
    curves = {
        name: replace(curve, points=tuple((rows, factor * seconds) for rows, seconds in curve.points))
        for name in ("pass_seconds", "prompt_seconds")
        if (curve := getattr(profile, name)) is not None
    }
    times = {
        name: replace(getattr(profile, name), value=factor * getattr(profile, name).value)
        for name in ("context_seconds", "prompt_context_seconds")
    }
    return replace(profile, **curves, **times)


def fitted(profile: WorkerProfile, runs: Runs) -> tuple[float, float]:
    """The factor on the times of the profile, and the seconds of the gateway."""

    def mean(name: str) -> float:
        return sum(sum(one[name] for one in some) / len(some) for some in runs.values()) / len(runs)

    def sim(factor: float, name: str) -> float:
        return sum(simulated(scaled(profile, factor), *case, 0.0)[name] for case in runs) / len(runs)

    factor = 1.0
    for _ in range(FIT_ROUNDS):
        factor *= mean("TPOT mean, ms") / sim(factor, "TPOT mean, ms")
    return factor, (mean("TTFT mean, ms") - sim(factor, "TTFT mean, ms")) / 1e3


def read_runs(path: Path) -> Runs:
    found: Runs = defaultdict(list)
    for line in path.read_text().splitlines():
        record = json.loads(line)
        found[record["rate"], record["requests"]].append(figures(record))
    return found


def report(options: argparse.Namespace) -> None:
    profile, runs = load_profile(str(options.folder / "worker.json")), read_runs(options.folder / "runs.jsonl")
    factor, gateway = fitted(profile, read_runs(options.folder / "fit.jsonl"))
    print(f"fit: times x {factor:.3f}, gateway {1e3 * gateway:.1f} ms\n")
    print("| requests/s | figure | real, mean | real, runs | simulated / real | fitted: simulated / real | goal |")
    print("|---|---|---|---|---|---|---|")
    for case, some in sorted(runs.items()):
        measured = simulated(profile, *case, 0.0)
        for name, value in simulated(scaled(profile, factor), *case, gateway).items():
            values = [one[name] for one in some]
            mean = sum(values) / len(values)
            goal, inside = 0.15 if "p99" in name else 0.05, min(values) <= value <= max(values)
            verdict = "met" if abs(value / mean - 1.0) <= goal else "within the runs" if inside else "missed"
            spread = f"{min(values):.4g} to {max(values):.4g} ({len(values)})"
            ratios = f"{measured[name] / mean:.3f} | {value / mean:.3f}"
            print(f"| {case[0]:g} | {name} | {mean:.4g} | {spread} | {ratios} | {goal:.0%}: {verdict} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("all", help="measure, then report")
    one.add_argument("--rate", type=float, action="append", help="requests per second; may be repeated")
    one.add_argument("--fit-rate", type=float, default=3.0, help="requests per second of the run that is fitted to")
    one.add_argument("--repeats", type=int, default=3, help="runs of each rate")
    one.add_argument("--requests", type=int, default=110, help="requests of a run")
    one.add_argument("--model", default="smollm2")
    one.set_defaults(command=measure)
    other = commands.add_parser("report", help="report what was measured")
    other.set_defaults(command=report)
    for command in (one, other):
        command.add_argument("folder", type=Path)
    options = parser.parse_args()
    options.command(options)


if __name__ == "__main__":
    main()

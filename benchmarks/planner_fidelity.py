"""The same trace on a real worker and in the simulator.

    taskset -c 0 paceline profile worker.json --model smollm2 --max-num-seqs 8 --max-model-len 512 --kv-tokens 8192
    python benchmarks/planner_fidelity.py run runs.jsonl --rate 3.5 --rate 4.5     # three times
    python benchmarks/planner_fidelity.py run runs.jsonl --rate 2.5                # three times
    python benchmarks/planner_fidelity.py run fit.jsonl --rate 3
    python benchmarks/planner_fidelity.py report worker.json runs.jsonl [--fit fit.jsonl]

`run` starts a cluster of one target worker with one thread on core 0. The gateway and this client run on core 1. Every request
arrives at its time (open loop). `report` simulates the same traces with the profile. `--fit` scales the times of the profile to
the mean TPOT of other runs, at other rates and with other prompts, and adds their difference in TTFT for the gateway.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
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

REQUESTS = 110
FIT_ROUNDS = 4
PROMPTS, OUTPUTS = (16, 24, 32, 48), (8, 12, 16, 24)
VOCABULARY = 49_000
WORKER_CORE, GATEWAY_CORE = 0, 1


def arrivals(rate: float) -> list[Arrival]:
    dice, now, made = random.Random(f"fidelity/{rate}"), 0.0, []
    for prompt in random_prompts(REQUESTS, PROMPTS, VOCABULARY, seed=round(1000 * rate)):
        made.append(Arrival(now, prompt, dice.choice(OUTPUTS)))
        now += dice.expovariate(rate)
    return made


def run(options: argparse.Namespace) -> None:
    limits = {"max_num_seqs": 8, "max_model_len": 512, "kv_tokens": 8192}
    pool = {"name": "target", "role": "target", "model": options.model, "devices": ["cpu"], "limits": limits}
    pool |= {"audit_fraction": 0.0, "speculation": {"enabled": False}}
    gateway = {"max_waiting": 1000, "log_requests": "none", "log_level": "warning"}
    with tempfile.TemporaryDirectory(prefix="fidelity-") as name:
        file = Path(name) / "cluster.yaml"
        health = {"canary": 0.0}
        document = {
            "name": "fidelity",
            "state_dir": f"{name}/state",
            "health": health,
            "gateway": gateway,
            "pools": [pool],
        }
        file.write_text(json.dumps(document))  # JSON is YAML
        port = free_address().rpartition(":")[2]
        url = f"http://127.0.0.1:{port}"
        paceline = [sys.executable, "-m", "paceline"]
        subprocess.run(
            ["taskset", "-c", str(WORKER_CORE), *paceline, "up", str(file)], check=True, stdout=subprocess.DEVNULL
        )
        os.sched_setaffinity(0, {GATEWAY_CORE})
        serve = [*paceline, "serve", "--config", str(file), "--port", port]
        with subprocess.Popen(
            serve, stdout=subprocess.DEVNULL, env={**os.environ, "PACELINE_ADMIN_KEY": KEY}
        ) as server:
            try:
                _until_ready(url)
                replay(
                    url, [Arrival(0.3 * i, one, 8) for i, one in enumerate(random_prompts(6, PROMPTS, VOCABULARY, 1))]
                )
                found = {rate: replay(url, arrivals(rate)) for rate in options.rate}
            finally:
                server.terminate()
                subprocess.run([*paceline, "down", str(file)], check=True, stdout=subprocess.DEVNULL)
    for rate, answers in found.items():
        failed = [one.error for one in answers if one.error]
        if failed:
            sys.exit(f"{len(failed)} requests failed, the first with {failed[0]}")
        record = {"rate": rate, "ttft": [one.ttft for one in answers], "tpot": [one.tpot for one in answers]}
        record |= {"tokens": sum(len(one.tokens) for one in answers), "seconds": max(one.last for one in answers)}
        with options.runs.open("a") as runs:
            runs.write(json.dumps(record) + "\n")
        print(rate, {name: f"{value:.4g}" for name, value in figures(record).items()}, flush=True)


def figures(record: dict[str, object]) -> dict[str, float]:
    ttft, tpot = (Quantiles.of(record[name]) for name in ("ttft", "tpot"))  # type: ignore[arg-type]
    return {
        "TTFT mean, ms": 1e3 * ttft.mean,
        "TTFT p99, ms": 1e3 * ttft.p99,
        "TPOT mean, ms": 1e3 * tpot.mean,
        "TPOT p99, ms": 1e3 * tpot.p99,
        "tokens/s": record["tokens"] / record["seconds"],  # type: ignore[operator]
    }


def simulated(profile: WorkerProfile, rate: float, gateway: float) -> dict[str, float]:
    """Figures of the same trace in the simulator; `gateway`: seconds that are added to every TTFT."""
    requests = tuple(TraceRequest(one.time, len(one.prompt), one.output_tokens) for one in arrivals(rate))
    config = SimulationConfig(profile, 1, router="least_loaded", mode="stepwise")
    result = simulate(config, Trace("fidelity", requests))
    jobs = result.jobs
    record = {"ttft": [job.ttft + gateway for job in jobs], "tpot": [job.tpot for job in jobs]}
    return figures({**record, "tokens": sum(job.output_tokens for job in jobs), "seconds": result.seconds + gateway})


def scaled(profile: WorkerProfile, factor: float) -> WorkerProfile:
    """The profile with all times of the target multiplied."""
    points = tuple((rows, factor * seconds) for rows, seconds in profile.pass_seconds.points)
    times = {
        name: replace(getattr(profile, name), value=factor * getattr(profile, name).value)
        for name in ("context_seconds", "prompt_context_seconds")
    }
    return replace(profile, pass_seconds=replace(profile.pass_seconds, points=points), **times)


def fitted(profile: WorkerProfile, runs: dict[float, list[dict[str, float]]]) -> tuple[float, float]:
    """The factor on the times of the profile, and the seconds of the gateway."""

    def mean(name: str) -> float:
        return sum(sum(one[name] for one in some) / len(some) for some in runs.values()) / len(runs)

    def sim(factor: float, name: str) -> float:
        return sum(simulated(scaled(profile, factor), rate, 0.0)[name] for rate in runs) / len(runs)

    factor = 1.0
    for _ in range(FIT_ROUNDS):
        factor *= mean("TPOT mean, ms") / sim(factor, "TPOT mean, ms")
    return factor, (mean("TTFT mean, ms") - sim(factor, "TTFT mean, ms")) / 1e3


def read_runs(path: Path) -> dict[float, list[dict[str, float]]]:
    by_rate: dict[float, list[dict[str, float]]] = defaultdict(list)
    for line in path.read_text().splitlines():
        record = json.loads(line)
        by_rate[record["rate"]].append(figures(record))
    return by_rate


def report(options: argparse.Namespace) -> None:
    profile, gateway = load_profile(str(options.profile)), 0.0
    if options.fit is not None:
        factor, gateway = fitted(profile, read_runs(options.fit))
        profile = scaled(profile, factor)
        print(f"times x {factor:.3f}, gateway {1e3 * gateway:.1f} ms\n")
    print("| requests/s | figure | real, mean | real, runs | simulated | simulated / real |\n|---|---|---|---|---|---|")
    for rate, runs in sorted(read_runs(options.runs).items()):
        for name, value in simulated(profile, rate, gateway).items():
            values = [one[name] for one in runs]
            mean = sum(values) / len(values)
            spread = f"{min(values):.4g} to {max(values):.4g} ({len(values)})"
            print(f"| {rate:g} | {name} | {mean:.4g} | {spread} | {value:.4g} | {value / mean:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.add_argument("runs", type=Path)
    one.add_argument("--rate", type=float, action="append", required=True, help="requests per second; may be repeated")
    one.add_argument("--model", default="smollm2")
    one.set_defaults(command=run)
    other = commands.add_parser("report")
    other.add_argument("profile", type=Path)
    other.add_argument("runs", type=Path)
    other.add_argument("--fit", type=Path, help="runs at other rates, to fit the profile to")
    other.set_defaults(command=report)
    options = parser.parse_args()
    options.command(options)


if __name__ == "__main__":
    main()

"""`paceline planner --act` on a cluster of processes whose load doubles and halves three times.

    paceline profile worker.json --model smollm2 --max-num-seqs 8 --max-model-len 512 --kv-tokens 8192 --price 1
    python benchmarks/planner_live.py worker.json --plot planner_live.png

Requests arrive at random, at a low and a high rate in turns. Every text is compared with plain decoding in one process.
Prints the decisions with cause, action and cost, and exits with 1 if a request was lost or a text differs.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from live_load import plain_tokens
from planner_load import Answer, Arrival, Replay

from paceline.bench.plots import load_pyplot
from paceline.runtime.deploy.deployment import free_address

KEY = "planner-benchmark"
PHASES = 7
"""Low and high load in turns: the load doubles three times and halves three times."""
START_SECONDS = 180.0
CASES = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profile", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second of the low load")
    parser.add_argument("--phase", type=float, default=85.0, help="seconds of each of the seven phases")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--price", type=float, default=1.0, help="dollars per hour of a worker")
    parser.add_argument("--max-workers", type=int, default=4)
    parser.add_argument("--ttft-ms", type=float, default=2500.0)
    parser.add_argument("--tpot-ms", type=float, default=500.0)
    parser.add_argument("--interval", type=float, default=5.0)
    parser.add_argument("--hold", type=float, default=25.0)
    parser.add_argument("--json", type=Path, help="write the decisions and the sizes of the pool")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    expected = plain_tokens(options.model, CASES, options.tokens, seed=0)
    arrivals = _arrivals(options, list(expected))
    with tempfile.TemporaryDirectory(prefix="planner-") as name, ExitStack() as stack:
        file = _cluster_file(Path(name), options)
        port = int(free_address().rpartition(":")[2])
        url = f"http://127.0.0.1:{port}"
        _paceline("up", str(file))
        stack.callback(_paceline, "down", str(file))
        stack.enter_context(_running("serve", "--config", str(file), "--port", str(port)))
        _until_ready(url)
        planner = ["planner", "--act", "--config", str(file), "--url", url, "--profile", str(options.profile)]
        planner += [
            "--price",
            str(options.price),
            "--max-workers",
            str(options.max_workers),
            "--hold",
            str(options.hold),
        ]
        planner += [
            "--interval",
            str(options.interval),
            "--ttft-ms",
            str(options.ttft_ms),
            "--tpot-ms",
            str(options.tpot_ms),
        ]
        stack.enter_context(_running(*planner))
        time.sleep(2.0 * options.interval)
        began = time.time()
        watch = Watch(url, began)
        watch.start()
        load = Replay(url, arrivals)
        load.start()
        load.join()
        time.sleep(2.0 * options.interval)
        watch.is_done.set()
        watch.join()
        plan = json.loads(_get(f"{url}/admin/plan"))
    wrong = [one for one in load.answers if not one.error and list(one.tokens) != expected[_case(one, expected)]]
    report(options, load.answers, wrong, plan, began)
    if options.json is not None:
        options.json.write_text(json.dumps({"began": began, "plan": plan, "sizes": watch.sizes}))
    if options.plot is not None:
        plot(options, plan, watch.sizes, load.answers, began)
    sys.exit(1 if wrong or any(one.error for one in load.answers) else 0)


def _arrivals(options: argparse.Namespace, cases: list[Any]) -> list[Arrival]:
    dice, arrivals = random.Random(1), []
    for phase in range(PHASES):
        now, end = phase * options.phase, (phase + 1) * options.phase
        rate = options.rate * (2.0 if phase % 2 else 1.0)
        while (now := now + dice.expovariate(rate)) < end:
            case = dice.choice(cases)
            arrivals.append(Arrival(now, case.prompt, options.tokens, case.seed, case.temperature))
    return arrivals


def _case(answer: Answer, expected: dict[Any, list[int]]) -> Any:
    return next(case for case in expected if case.seed == answer.arrival.seed and case.prompt == answer.arrival.prompt)


class Watch(threading.Thread):
    """Ready workers over time, as the gateway reports them."""

    def __init__(self, url: str, began: float) -> None:
        super().__init__(daemon=True)
        self._url, self._began = url, began
        self.sizes: list[tuple[float, int]] = []
        self.is_done = threading.Event()

    def run(self) -> None:
        while not self.is_done.wait(1.0):
            lines = _get(f"{self._url}/metrics").splitlines()
            ready = sum(line.startswith("paceline_worker_ready{") and line.endswith(" 1.0") for line in lines)
            self.sizes.append((time.time() - self._began, ready))


def report(options: argparse.Namespace, answers: list[Answer], wrong: list[Answer], plan: Any, began: float) -> None:
    lost = [one for one in answers if one.error]
    ttfts = sorted(one.ttft for one in answers if not one.error)
    met = sum(
        one.ttft <= options.ttft_ms / 1e3 and one.tpot <= options.tpot_ms / 1e3 for one in answers if not one.error
    )
    print(
        f"\n{options.model}, {PHASES} phases of {options.phase:g} s at {options.rate:g} and {2 * options.rate:g} requests/s\n"
    )
    print(
        "| requests | lost | different text | in the objective | TTFT p50, s | TTFT p99, s |\n|---|---|---|---|---|---|"
    )
    middle, high = ttfts[len(ttfts) // 2], ttfts[int(0.99 * (len(ttfts) - 1))]
    share = met / len(answers)
    print(f"| {len(answers)} | {len(lost)} | {len(wrong)} | {share:.1%} | {middle:.2f} | {high:.2f} |\n")
    print("| time, s | cause | action | $/h | reason |\n|---|---|---|---|---|")
    for one in plan["changes"]:
        moves = ", ".join(f"{role} {one['before'].get(role, 0)} -> {size}" for role, size in one["sizes"].items())
        cost = f"{one['dollars_per_hour']:.2f}"
        print(f"| {one['time'] - began:.0f} | {one['cause']} | {moves} | {cost} | {one['reason']} |")
    for answer in lost[:5]:
        print(f"LOST: {answer.error}")


def plot(
    options: argparse.Namespace, plan: Any, sizes: list[tuple[float, int]], answers: list[Answer], began: float
) -> None:
    plt = load_pyplot()
    figure, (load, pool, wait) = plt.subplots(3, 1, figsize=(10, 7), sharex=True)
    times = [one["time"] - began for one in plan["samples"]]
    edges = [options.phase * i for i in range(PHASES + 1)]
    offered = [options.rate * (2.0 if i % 2 else 1.0) for i in range(PHASES)]
    load.stairs(offered, edges, color="0.6", label="offered")
    for name in ("load", "forecast"):
        load.plot(times, [one[name] for one in plan["samples"]], label=name, linewidth=1)
    load.set_ylabel("requests per second")
    pool.step(times, [one["sizes"]["target"] for one in plan["samples"]], where="post", label="planned")
    pool.step(*zip(*sizes, strict=True), where="post", label="ready", linewidth=1)
    pool.set_ylabel("target workers")
    wait.scatter([one.arrival.time for one in answers], [one.ttft for one in answers], s=4, label="TTFT")
    wait.axhline(options.ttft_ms / 1e3, color="C3", linewidth=1, label="objective")
    wait.set_ylabel("seconds")
    wait.set_xlabel("seconds")
    for axes in (load, pool, wait):
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper right", fontsize=8)
    figure.tight_layout()
    figure.savefig(options.plot, dpi=120)


def _cluster_file(folder: Path, options: argparse.Namespace) -> Path:
    limits = {"max_num_seqs": 8, "max_model_len": 512, "kv_tokens": 8192}
    pool = {"name": "target", "role": "target", "model": options.model, "devices": ["cpu"], "limits": limits}
    pool |= {"price": options.price, "audit_fraction": 0.0, "speculation": {"enabled": False}}
    gateway = {"max_waiting": 1000, "log_requests": "none", "log_level": "warning"}
    document = {"name": "planner-live", "state_dir": str(folder / "state"), "gateway": gateway, "pools": [pool]}
    (folder / "cluster.yaml").write_text(json.dumps(document))  # JSON is YAML
    return folder / "cluster.yaml"


def _paceline(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "paceline", *arguments], check=True)


@contextmanager
def _running(*arguments: str) -> Iterator[None]:
    environment = {**os.environ, "PACELINE_API_KEY" if arguments[0] == "planner" else "PACELINE_ADMIN_KEY": KEY}
    command = [sys.executable, "-m", "paceline", *arguments]
    output = None if arguments[0] == "planner" else subprocess.DEVNULL
    with subprocess.Popen(command, env=environment, stdout=output) as process:
        try:
            yield
        finally:
            process.terminate()


def _until_ready(url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


def _get(url: str) -> str:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(answer.read().decode())


if __name__ == "__main__":
    main()

"""Live pools under load: no stream may be lost or different while workers join, drain, are replaced, and a gateway dies.

    python benchmarks/live/live.py --tokens 48 --pause 2 --plot docs/live.png
    python benchmarks/live/live.py --tokens 48 --pause 2 --plot docs/live_ray.png --ray

One target behind two gateways, as processes, or with `--ray` as actors on two virtual nodes of Ray. Clients stream over
HTTP, half greedy and half sampled; tokens are compared with plain decoding in one process. The script types the commands that
an operator types. The draft pool starts with a draft that does not match the target. Targets always draft three tokens: a
fixed depth, without circuit breaker. Exit status 1: a stream was lost or different, or a swap had another verdict than planted.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from live_load import Results, Streams, plain_tokens
from live_models import Models, write_models

from paceline.core.cluster_config import ClusterConfig, cluster_config
from paceline.deploy.deployment import find_cluster, free_address
from paceline.tools.plots.plots import load_pyplot
from paceline.wire.worker_spec import Member

REASON = re.compile(r"(draft drafts with|draft keeps|error:).*")
DEADLINE = 5.0
"""`drain_seconds` of the cluster."""


@dataclass(frozen=True)
class SwapVerdict:
    """How `paceline draft swap` ended."""

    what: str
    is_kept: bool
    reason: str


class Scenario:
    """Types commands, kills processes, and notes when each began and ended."""

    def __init__(self, folder: Path, config: ClusterConfig, urls: list[str]) -> None:
        self.file, self._urls = folder / "cluster.yaml", urls
        self._folder, self._config = folder, config
        self.events: list[tuple[str, float, float]] = []
        self.figures: dict[str, float] = {}
        self.verdicts: list[SwapVerdict] = []

    def command(self, *words: str) -> None:
        """Runs `paceline WORDS`."""
        label = " ".join(word for word in words if word not in ("--config", str(self.file)))
        status, text = self._run(label, words)
        if status:
            raise RuntimeError(f"paceline {label}: {text}")

    def swap(self, what: str, draft: str, seconds: float) -> None:
        """Runs `paceline draft swap`; status 1 means that the old draft stays."""
        words = ("draft", "swap", "draft", draft, "--seconds", f"{seconds:g}", "--config", str(self.file))
        status, text = self._run(f"swap to {what}", words)
        words_said = " ".join(text.split()).replace(f"{self._folder}/", "")
        found = REASON.search(words_said)  # after the table of workers
        reason = found[0] if found else words_said
        self.verdicts.append(SwapVerdict(what, status == 0, reason))
        print(f"          {reason}", flush=True)

    def _run(self, label: str, words: Sequence[str]) -> tuple[int, str]:
        started = time.monotonic()
        result = subprocess.run(
            [sys.executable, "-m", "paceline", *words], capture_output=True, text=True, check=False, cwd=self._folder
        )
        self.events.append((label, started, time.monotonic()))
        print(f"{time.monotonic() - started:6.1f} s  {label}", flush=True)
        return result.returncode, result.stdout + result.stderr

    def scale_up(self, pool: str, count: int) -> None:
        """Scales, and measures the seconds until the last new worker has generated tokens."""
        started = time.monotonic()
        self.command("scale", pool, str(count), "--config", str(self.file))
        if pool == "target":
            worker = f"{pool}-{count - 1}"
            until(lambda: any(tokens_of(url, worker) > 0 for url in self._urls), 120, f"tokens of {worker}")
            self.figures[f"scale to first token of {worker}"] = time.monotonic() - started

    def terminate(self, worker: str) -> None:
        """Sends SIGTERM to a worker, as Kubernetes does, and measures the seconds until its process is gone."""
        before = self._member(worker)
        pid, started = pid_at(before.address), time.monotonic()
        os.kill(pid, signal.SIGTERM)
        until(lambda: not Path(f"/proc/{pid}").exists() or is_zombie(pid), 60, f"the exit of {worker}")
        self.figures[f"SIGTERM of {worker} with {DEADLINE:g} s"] = time.monotonic() - started
        self.events.append((f"SIGTERM {worker}", started, time.monotonic()))
        life = before.life.restarts
        until(lambda: self._member(worker).life.restarts > life, 60, f"the restart of {worker}")
        print(
            f"{time.monotonic() - started:6.1f} s  SIGTERM {worker}: {self._member(worker).life.last_exit}", flush=True
        )

    def _member(self, name: str) -> Member:
        return next(member for member in find_cluster(self._config).members() if member.name == name)


def tokens_of(url: str, worker: str) -> float:
    """Tokens that the worker has generated for this gateway."""
    page = get(f"{url}/metrics") or ""
    name = "paceline_worker_generated_tokens_total"
    marked = [line for line in page.splitlines() if line.startswith(name) and f'"{worker}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in marked)


def pid_at(address: str) -> int:
    """Process id of the worker that listens at the address."""
    import psutil

    port = int(address.rpartition(":")[2])
    for process in psutil.process_iter():
        try:
            sockets = process.net_connections("tcp")
            if any(
                listener.laddr and listener.laddr.port == port and listener.status == "LISTEN" for listener in sockets
            ):
                return process.pid
        except psutil.Error:
            continue
    raise LookupError(f"no worker listens at {address}")


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.05)


def get(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return str(response.read().decode())
    except OSError:
        return None


def report(title: str, scenario: Scenario, results: Results, lost: list[str], seconds: float) -> None:
    tokens = sum(count for _, count in results.arrivals)
    print(f"\n{title}, {seconds:.0f} s\n")
    print("| streams | tokens | tokens/s | resumed | lost | different |\n|---|---|---|---|---|---|")
    print(
        f"| {results.finished} | {tokens} | {tokens / seconds:.0f} | {results.resumed} | {len(lost)} "
        f"| {len(results.different)} |\n"
    )
    print("| event | seconds |\n|---|---|")
    for label, began, ended in scenario.events:
        print(f"| `{label}` | {ended - began:.1f} |")
    for label, value in scenario.figures.items():
        print(f"| {label} | {value:.1f} |")
    for verdict in scenario.verdicts:
        print(f"| swap to {verdict.what}: {'kept' if verdict.is_kept else 'rolled back'} | {verdict.reason} |")
    for error in lost[:5]:
        print(f"LOST: {error}")


def plot(results: Results, scenario: Scenario, started: float, path: Path) -> None:
    """Tokens per second over time, with the events."""
    plt = load_pyplot()
    buckets: dict[int, int] = {}
    for when, count in results.arrivals:
        buckets[int(when - started)] = buckets.get(int(when - started), 0) + count
    seconds = range(max(buckets, default=0))
    figure, axes = plt.subplots(figsize=(10, 4))
    axes.plot(seconds, [buckets.get(second, 0) for second in seconds], linewidth=1)
    for i, (label, began, ended) in enumerate(event for event in scenario.events if event[1] >= started):
        axes.axvspan(began - started, max(ended, began + 0.3) - started, alpha=0.15, color=f"C{i % 9 + 1}")
        axes.text(began - started, axes.get_ylim()[1] * (0.97 - 0.06 * (i % 5)), label, fontsize=7, va="top")
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


START_SECONDS, JOIN_SECONDS = 600.0, 240.0
NEVER = 1 << 30
"""Lossy windows that open a circuit breaker."""
LIMITS = {"max_num_seqs": 16, "max_batched_tokens": 256, "max_model_len": 512, "kv_tokens": 16384}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48, help="of the target; a draft has two")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pause", type=float, default=4.0, help="seconds between two events")
    parser.add_argument("--trial", type=float, default=300.0, help="longest seconds of the trial of a draft")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--ray", action="store_true", help="workers as actors of a local Ray cluster")
    options = parser.parse_args()
    results = Results()
    with tempfile.TemporaryDirectory(prefix="live-") as name, ExitStack() as stack:
        folder = Path(name)
        models = write_models(folder / "models", options.layers)
        expected = plain_tokens(models.target, 12, options.tokens, options.seed)
        ports = [int(free_address().rpartition(":")[2]) for _ in range(2)]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        document = _document(models, folder)
        if options.ray:
            document["ray"] = stack.enter_context(_ray_cluster())
        (folder / "cluster.yaml").write_text(json.dumps(document))  # JSON is YAML
        scenario = Scenario(folder, cluster_config(document), urls)
        scenario.command("up", str(scenario.file))
        stack.callback(scenario.command, "down", str(scenario.file))
        gateways = [stack.enter_context(gateway(scenario.file, port)) for port in ports]
        streams = Streams(urls, expected, results, options.streams)
        streams.start()
        started = time.monotonic()
        for act in _acts(scenario, gateways, models, options.trial):
            time.sleep(options.pause)
            act()
        time.sleep(options.pause)
        unfinished = streams.join(JOIN_SECONDS)
        ended = time.monotonic()
    lost = [*results.lost, *(["a stream did not end"] * unfinished)]
    where = "Ray" if options.ray else "processes"
    report(f"{where}, {options.streams} streams of {options.tokens} tokens", scenario, results, lost, ended - started)
    if options.plot is not None:
        plot(results, scenario, started, options.plot)
    is_planted = [verdict.is_kept for verdict in scenario.verdicts] == [False, True, False]
    sys.exit(1 if lost or results.different or not is_planted else 0)


def _acts(
    scenario: Scenario, gateways: "list[subprocess.Popen[bytes]]", models: Models, trial: float
) -> Iterator[Callable[[], object]]:
    file = str(scenario.file)
    yield lambda: scenario.scale_up("target", 3)
    yield lambda: scenario.scale_up("draft", 2)
    yield lambda: scenario.command("rollout", "--config", file)
    yield lambda: scenario.swap("a draft of another vocabulary", models.other, trial)
    yield lambda: scenario.swap("a better draft", models.good, trial)
    yield lambda: scenario.swap("a worse draft", models.poor, trial)
    yield lambda: scenario.terminate("target-1")

    def kill() -> None:
        now = time.monotonic()
        gateways[0].kill()
        scenario.events.append(("kill -9 of a gateway", now, now))

    yield kill
    yield lambda: scenario.command("scale", "draft", "0", "--config", file)
    yield lambda: scenario.command("scale", "target", "1", "--config", file)


def _document(models: Models, folder: Path) -> dict[str, Any]:
    pool = {"devices": ["cpu"], "limits": LIMITS}
    speculation = {"depth": "fixed", "max_depth": 3, "breaker_rounds": NEVER}
    target = {"name": "target", "role": "target", "model": models.target, "speculation": speculation, **pool}
    draft = {"name": "draft", "role": "draft", "model": models.poor, "replicas": 0, **pool}
    gateway = {"max_waiting": 1000, "log_requests": "none", "log_level": "warning", "gateways": 2}
    return {
        "name": "live",
        "state_dir": str(folder / "state"),
        "drain_seconds": DEADLINE,
        "gateway": gateway,
        "pools": [target, draft],
    }


@contextmanager
def _ray_cluster() -> Iterator[str]:
    """The address of two virtual nodes, with room for all workers of the scenario."""
    # Read by Ray when it is imported. Its actors have niceness 15 by default; other programs would decide the figures.
    os.environ.update({"RAY_raylet_start_wait_time_s": "120", "RAY_worker_niceness": "0"})
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=4)
        yield str(cluster.address)
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def gateway(file: Path, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "paceline", "serve", "--config", str(file), "--port", str(port)]
    with (
        (file.parent / f"gateway-{port}.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as one,
    ):
        try:
            until(lambda: get(f"http://127.0.0.1:{port}/ready") is not None, START_SECONDS, "the gateway")
            yield one
        finally:
            one.terminate()


if __name__ == "__main__":
    main()

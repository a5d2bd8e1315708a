"""A cluster of processes under faults: no stream may be lost or different, and nothing may leak.

    make chaos                       # 10 minutes, 32 streams, a fault about every 4 seconds
    make soak                        # 60 minutes, a fault about every 2 minutes
    python benchmarks/trust/chaos.py --seed 7 --minutes 2 --model PATH --draft PATH
    python benchmarks/trust/chaos.py --ray # workers on a local Ray cluster

Two targets and two drafts behind a gateway process. Clients stream over HTTP; the text of each request is compared with plain
decoding by the same gateway before the first fault. The seed decides faults, requests and pauses. Exit status 1: a
stream was lost or different, or something leaked.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from chaos_faults import CLOCK_PATCH, Event, Faults, Link
from chaos_load import POISON, Results, Streams, cases, plain_text, send_poison

from paceline.core.cluster_config import ClusterConfig, cluster_config
from paceline.core.errors import PacelineError
from paceline.deploy.deployment import free_address, process_specs
from paceline.deploy.processes.state import StateFolder
from paceline.deploy.processes.supervisor import Supervisor

SAMPLE_SECONDS = 10.0
SHOWN = 6
"""Points in time of the table."""


@dataclass
class History:
    """Resident memory of one process, in MB, from its first sample on. A worker that is started again has a new history."""

    name: str
    pid: int
    times: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """MB by which the mean of the last quarter exceeds that of the second. The first one loads and warms up."""
        quarter = len(self.sizes) // 4
        if not quarter:
            return 0.0
        second, last = self.sizes[quarter : 2 * quarter], self.sizes[-quarter:]
        return sum(last) / quarter - sum(second) / quarter


class MemoryLog:
    """Samples the processes that `pids` names, on a thread, inside `with`."""

    def __init__(self, pids: Callable[[], dict[str, int]], seconds: float = SAMPLE_SECONDS) -> None:
        self.histories: dict[int, History] = {}
        self._pids, self._seconds, self._began = pids, seconds, time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "MemoryLog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def sample(self) -> None:
        for name, pid in self._pids().items():
            with suppress(psutil.Error):
                size = psutil.Process(pid).memory_info().rss / 1e6
                history = self.histories.setdefault(pid, History(name, pid))
                history.times.append(time.monotonic() - self._began)
                history.sizes.append(size)

    def table(self) -> list[str]:
        """A line for each process that lived long enough to be sampled four times: its size at six times, and its growth."""
        lines = ["| process | lived | resident memory, MB | growth, MB |", "|---|---|---|---|"]
        for history in sorted(self.histories.values(), key=lambda history: (history.name, history.times[0])):
            if len(history.sizes) < 4:
                continue
            shown = [history.sizes[round(i * (len(history.sizes) - 1) / (SHOWN - 1))] for i in range(SHOWN)]
            sizes = " ".join(f"{size:.0f}" for size in shown)
            lines.append(
                f"| {history.name} | {history.times[0]:.0f} to {history.times[-1]:.0f} s | {sizes} | {history.growth:+.0f} |"
            )
        return lines

    def _run(self) -> None:
        self.sample()
        while not self._stop.wait(self._seconds):
            self.sample()


LIMITS = {"max_num_seqs": 24, "max_batched_tokens": 256, "max_model_len": 512, "kv_tokens": 16384}
IDLE_SECONDS, START_SECONDS, DRAIN_SECONDS = 60.0, 300.0, 180.0
SHARED_MEMORY = Path("/dev/shm")
Pids = Callable[[], dict[str, int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", default="smollm2-distilled")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--every", type=float, default=4.0, help="mean seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ray", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        failures = run(options, Path(folder))
    for failure in failures:
        print(f"FAILED: {failure}")
    sys.exit(1 if failures else 0)


def run(options: argparse.Namespace, folder: Path) -> list[str]:
    """Runs the cluster under load and prints the report. Returns what must not happen and did."""
    shared, children = _names(SHARED_MEMORY), _children()
    clock = _patch_clock(folder)
    results = Results()
    with ExitStack() as stack:
        document = _document(options, folder)
        workers = _on_ray(document) if options.ray else _as_processes(cluster_config(document))
        pids, links = stack.enter_context(workers)
        gateway, url = stack.enter_context(_gateway(document, folder))
        known = cases(options.seed, 12, options.tokens)
        expected = {case: plain_text(url, case) for case in known}
        streams = Streams(url, expected, results, options.streams, options.seed)
        streams.start()
        calm = time.monotonic()
        time.sleep(min(10.0, 6 * options.minutes))
        with results.lock:
            calm_gap = max((end - start for start, end in results.gaps), default=0.0)
        memory = stack.enter_context(MemoryLog(lambda: {"gateway": gateway.pid, **pids()}))

        def poison(rng: random.Random) -> str:
            name = rng.choice(sorted(POISON))
            send_poison(url, name, results)
            return name

        faults = Faults(options.seed, pids, gateway.pid, links, clock, poison, options.every)
        started = time.monotonic()
        faults.run(started + 60 * options.minutes)
        unfinished = streams.join(DRAIN_SECONDS)
        seconds = time.monotonic() - calm
        leaks = _leaks(url)
    leaks += [f"process {name}" for name in _children() - children]
    leaks += [f"shared memory {name}" for name in _names(SHARED_MEMORY) - shared]
    lost = [*results.lost, *(["a stream did not end"] * unfinished)]
    _report(options, results, faults.events, lost, leaks, memory, calm_gap, seconds)
    failures = [*lost[:5], *results.different[:5], *leaks]
    if failures:
        print((folder / "gateway.log").read_text()[-3000:])
    return failures


def _report(
    options: argparse.Namespace,
    results: Results,
    events: list[Event],
    lost: list[str],
    leaks: list[str],
    memory: MemoryLog,
    calm_gap: float,
    seconds: float,
) -> None:
    frozen = [(event.start, event.end) for event in events if event.fault == "gateway freeze"]
    gaps = [end - start - _overlap(start, end, frozen) for start, end in results.gaps]
    first, last = max(results.gaps, key=lambda gap: gap[1] - gap[0], default=(0.0, 0.0))
    longest = last - first
    causes = [f"{event.fault}: {event.where}" for event in events if _overlap(first, last, [(event.start, event.end)])]
    counts = Counter(event.fault for event in events)
    print(
        f"\n{options.model} with draft {options.draft}, {options.streams} streams, seed {options.seed}, {seconds:.0f} s"
    )
    print(
        "| streams | tokens | refused | lost | different | leaked | longest gap | without gateway freezes | without faults |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    print(
        f"| {results.finished} | {results.tokens} | {results.refused} | {len(lost)} | {len(results.different)} | {len(leaks)} "
        f"| {longest:.1f} s | {max(gaps, default=0.0):.1f} s | {calm_gap:.1f} s |"
    )
    print("faults under way in the longest gap: " + (", ".join(causes) or "none"))
    print("faults: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    print("poison statuses: " + ", ".join(f"{status}: {count}" for status, count in sorted(results.poison.items())))
    print("\n".join(memory.table()))


def _document(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The configuration file of the cluster."""
    tiers = {"kv_host_bytes": 64 << 20, "kv_disk": str(folder / "kv"), "kv_disk_bytes": 256 << 20}
    pool = {"replicas": 2, "devices": ["cpu"]}
    draft = {"name": "draft", "role": "draft", "model": options.draft, "placement": {"with": "target"}}
    target = {"name": "target", "role": "target", "model": options.model}
    target["speculation"] = {"depth": "fixed", "max_depth": 3}
    pools = [{**target, "limits": {**LIMITS, **tiers}, **pool}, {**draft, "limits": LIMITS, **pool}]
    return {"name": "chaos", "state_dir": str(folder / "state"), "pools": pools}


@contextmanager
def _as_processes(config: ClusterConfig) -> Iterator[tuple[Pids, dict[str, Link]]]:
    """Workers behind links. The gateway finds the links in the state folder."""
    state, specs, stop = StateFolder.of(config), process_specs(config), threading.Event()
    state.acquire()
    supervisor = Supervisor(specs, state.logs)
    supervisor.start()
    thread = threading.Thread(target=supervisor.run, args=(stop,))
    thread.start()
    links = {spec.name: Link("127.0.0.1", int(spec.address.rpartition(":")[2])) for spec in specs}
    try:
        state.write([spec.member(links[spec.name].address) for spec in specs])
        yield lambda: supervisor.pids, links
    finally:
        stop.set()
        thread.join()
        for link in links.values():
            link.close()
        state.release()


@contextmanager
def _on_ray(document: dict[str, Any]) -> Iterator[tuple[Pids, dict[str, Link]]]:
    """Workers on two virtual nodes. Adds the address of the Ray cluster to `document`."""
    import ray
    from ray.cluster_utils import Cluster

    from paceline.deploy.ray.deployment import RayDeployment

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    document["ray"] = cluster.address
    config = cluster_config(document)
    try:
        deployment = RayDeployment.up(config)

        def pids() -> dict[str, int]:
            with suppress(PacelineError):
                return {name: pid for name, (pid, _) in deployment.pids().items()}
            return {}

        yield pids, {}
        RayDeployment.down(config)
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def _gateway(document: dict[str, Any], folder: Path) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """The gateway process, once its workers are ready, and its URL."""
    port = int(free_address().rpartition(":")[2])
    settings = {"port": port, "max_waiting": 1000, "log_requests": "none"}
    file = folder / "cluster.yaml"
    file.write_text(json.dumps({**document, "gateway": settings}))  # JSON is YAML
    command, url = [sys.executable, "-m", "paceline", "serve", "--config", str(file)], f"http://127.0.0.1:{port}"
    with (folder / "gateway.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _until(lambda: process.poll() is not None or _get(f"{url}/ready") == 200, START_SECONDS, "the gateway")
            if process.poll() is not None:
                raise RuntimeError(f"the gateway ended:\n{(folder / 'gateway.log').read_text()[-2000:]}")
            yield process, url
        finally:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
            process.terminate()


def _patch_clock(folder: Path) -> Path:
    """Makes all processes that start from here on read their wall clock's offset from a file."""
    (folder / "clock").mkdir()
    (folder / "clock" / "sitecustomize.py").write_text(CLOCK_PATCH)
    offset = folder / "clock" / "offset"
    offset.write_text("0")
    os.environ["CHAOS_CLOCK"] = str(offset)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder / "clock"), os.environ.get("PYTHONPATH"))))
    return offset


def _leaks(url: str) -> list[str]:
    """Sequences, KV blocks and queue places that an idle cluster still holds."""
    names = ("sequences_running", "sequences_waiting", "kv_blocks_used", "queue_choices")
    held: dict[str, float | str] = {}

    def is_idle() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
                text = response.read().decode()
        except OSError as error:
            held["no metrics"], held["error"] = 1, str(error)
            return False
        held.clear()
        for name in names:
            held[name] = sum(map(float, re.findall(rf"^paceline_{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)))
        return not any(held.values())

    with suppress(TimeoutError):
        _until(is_idle, IDLE_SECONDS, "an idle cluster")
    return [f"{name} {count}" for name, count in held.items() if count]


def _until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.2)


def _get(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return int(response.status)
    except OSError:
        return 0


def _overlap(start: float, end: float, windows: list[tuple[float, float]]) -> float:
    return sum(max(0.0, min(end, until) - max(start, since)) for since, until in windows)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _children() -> set[str]:
    return {f"{child.pid} {child.name()}" for child in psutil.Process().children(recursive=True)}


if __name__ == "__main__":
    main()

"""Servers of planner_fidelity.py: a cluster on pinned cores, a server with one engine, and the depths of their drafts."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from planner_live import KEY, START_SECONDS, _get

from paceline.runtime.deploy.deployment import free_address

PACELINE = (sys.executable, "-m", "paceline")
LIMITS = {"max_num_seqs": 8, "max_model_len": 512, "kv_tokens": 8192}
GATEWAY_CORE = 1


@contextmanager
def cluster(model: str, draft: str | None, depth: int, workers: int) -> Iterator[str]:
    """The address of the gateway of a cluster of target workers, worker i with one thread on core i. With one worker the
    gateway and this process have core 1 for themselves."""
    pool = {"name": "target", "role": "target", "model": model, "replicas": workers, "limits": LIMITS}
    pool |= {"devices": ["cpu"], "audit_fraction": 0.0, "speculation": {"enabled": False}}
    if draft is not None:
        pool |= {"draft": draft, "speculation": {"depth": "fixed", "max_depth": depth, "breaker_rounds": 10**9}}
    gateway = {"max_waiting": 1000, "log_requests": "none", "log_level": "warning"}
    with tempfile.TemporaryDirectory(prefix="fidelity-") as name:
        file, state = Path(name) / "cluster.yaml", Path(name) / "state"
        document = {"name": "fidelity", "state_dir": str(state), "health": {"canary": 0.0}}
        document |= {"router": "least_loaded", "gateway": gateway, "pools": [pool]}
        file.write_text(json.dumps(document))  # JSON is YAML
        cores = ",".join(map(str, range(workers)))
        subprocess.run(["taskset", "-c", cores, *PACELINE, "up", str(file)], check=True, stdout=subprocess.DEVNULL)
        try:
            _pin(json.loads((state / "state.json").read_text())["pid"], workers)
            if workers == 1:
                os.sched_setaffinity(0, {GATEWAY_CORE})
            with _serving("--config", str(file)) as url:
                yield url
        finally:
            subprocess.run([*PACELINE, "down", str(file)], check=True, stdout=subprocess.DEVNULL)


@contextmanager
def server(model: str, draft: str, options: Sequence[str]) -> Iterator[str]:
    """The address of `paceline serve` with one engine."""
    with _serving("--model", model, "--draft", draft, "--log-level", "warning", *options) as url:
        yield url


@contextmanager
def _serving(*arguments: str) -> Iterator[str]:
    port = free_address().rpartition(":")[2]
    command, environment = [*PACELINE, "serve", *arguments, "--port", port], {**os.environ, "PACELINE_ADMIN_KEY": KEY}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        try:
            _until_ready(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit(f"the server is not ready after {START_SECONDS:.0f} s, or has ended")


def _pin(supervisor: int, workers: int) -> None:
    """Give every worker, a child of the supervisor, a core of its own."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    if len(children) != workers:
        raise SystemExit(f"the supervisor has {len(children)} child processes for {workers} workers: cannot pin them")
    for core, child in enumerate(children):
        subprocess.run(["taskset", "-a", "-c", "-p", str(core), child], check=True, stdout=subprocess.DEVNULL)


@dataclass(frozen=True)
class DraftDepths:
    """Rounds by depth, since the start of a server."""

    rounds: Counter[int]

    @classmethod
    def read(cls, url: str) -> "DraftDepths":
        rounds, below = Counter[int](), Counter[str]()
        for line in _get(f"{url}/metrics").splitlines():
            bucket = re.match(r'paceline_draft_depth_bucket\{(.*)le="([\d.]+)"(.*)\} (\S+)', line)
            if bucket is not None:
                labels, count = bucket[1] + bucket[3], int(float(bucket[4]))
                rounds[int(float(bucket[2]))] += count - below[labels]
                below[labels] = count
        return cls(rounds)

    def since(self, before: "DraftDepths") -> "DraftDepths":
        return DraftDepths(self.rounds - before.rounds)

    @property
    def mean(self) -> float:
        return sum(depth * count for depth, count in self.rounds.items()) / max(1, self.rounds.total())

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of the rounds that drafted each position."""
        deepest, total = max(self.rounds, default=0), self.rounds.total()
        return tuple(
            sum(count for depth, count in self.rounds.items() if depth >= position) / total
            for position in range(1, deepest + 1)
        )

"""What an operator does in `live.py`: commands and signals, each with the time it began and ended."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core.cluster_config import ClusterConfig
from paceline.runtime.deploy.deployment import find_cluster
from paceline.runtime.deploy.directory import Member

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
        return next(one for one in find_cluster(self._config).members() if one.name == name)


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
            if any(one.laddr and one.laddr.port == port and one.status == "LISTEN" for one in sockets):
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

"""The cluster of `chaos.py`: workers and a gateway behind links, its memory, and what is left of it. `soak.py` uses parts.

All processes of a run have its folder in their environment: those that are not below this process are orphans.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from chaos_links import Link
from tests.engine.start.test_build import save_checkpoint

from paceline.core.cluster_config import ClusterConfig, cluster_config
from paceline.deploy.deployment import free_address, process_specs
from paceline.deploy.processes.state import StateFolder
from paceline.deploy.processes.supervisor import Supervisor

START_SECONDS, IDLE_SECONDS = 3600.0, 600.0
SAMPLE_SECONDS = 10.0
SHARED_MEMORY = Path("/dev/shm")
GATEWAY = "gateway"
RUN = "CHAOS_RUN"
"""Variable of the environment with the folder of the run."""
LIMITS = {"max_num_seqs": 24, "max_batched_tokens": 256, "max_model_len": 512, "kv_tokens": 16384}
PATCH = '''"""Adds the offset in the file CHAOS_CLOCK to the wall clock of this process. Makes its disk read-only while the
folder CHAOS_READ_ONLY has a file with its id."""
import errno, os, sys, time

_path, _time, _time_ns = os.environ["CHAOS_CLOCK"], time.time, time.time_ns
_folder, _read_only = os.path.dirname(os.path.dirname(_path)), os.environ["CHAOS_READ_ONLY"]
_writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def _offset():
    try:
        with open(_path) as file:
            return float(file.read() or 0)
    except (OSError, ValueError):
        return 0.0


def _audit(event, values):
    if event == "open" and not (isinstance(values[2], int) and values[2] & _writes):
        return
    if event not in ("open", "os.mkdir", "os.rename", "os.remove", "os.truncate"):
        return
    if str(values[0]).startswith(_folder) and os.path.exists(f"{_read_only}/{os.getpid()}"):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(values[0]))


time.time = lambda: _time() + _offset()
time.time_ns = lambda: _time_ns() + int(_offset() * 1e9)
sys.addaudithook(_audit)
'''


def patch(folder: Path) -> tuple[Path, Path]:
    """Makes the processes that start from here on read their clock's offset from a file. Returns it, and the folder with the
    ids of the processes whose disk is read-only."""
    home, read_only = folder / "patch", folder / "patch" / "read-only"
    read_only.mkdir(parents=True)
    (home / "sitecustomize.py").write_text(PATCH)
    (home / "offset").write_text("0")
    os.environ.update(CHAOS_CLOCK=str(home / "offset"), CHAOS_READ_ONLY=str(read_only))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(home), os.environ.get("PYTHONPATH"))))
    return home / "offset", read_only


def mark(folder: Path) -> None:
    """Marks the processes that start from here on, for `orphans`."""
    os.environ[RUN] = str(folder)


def models(folder: Path) -> tuple[str, str, str]:
    """A target of random weights and two drafts, which the shared noise sometimes makes right."""
    shapes = {"target": {"num_hidden_layers": 16}, "draft": {}, "second": {"seed": 7}}
    target, draft, second = (
        save_checkpoint(folder / name, max_position_embeddings=512, **shape) for name, shape in shapes.items()
    )
    return target, draft, second


def document(folder: Path, target: str, draft: str) -> dict[str, Any]:
    """The configuration file of a cluster with two targets, a draft worker and a prefill worker."""
    tiers = {"kv_host_bytes": 64 << 20, "kv_disk": str(folder / "kv"), "kv_disk_bytes": 256 << 20}
    common = {"devices": ["cpu"], "limits": LIMITS}
    targets = {"name": "target", "role": "target", "model": target, "replicas": 2, "devices": ["cpu"]}
    targets |= {"limits": {**LIMITS, **tiers}, "speculation": {"depth": "fixed", "max_depth": 3}}
    drafts = {"name": "draft", "role": "draft", "model": draft, **common}
    prefill = {"name": "prefill", "role": "prefill", "model": target, **common}
    pools = [targets, drafts, prefill]
    return {"name": "chaos", "state_dir": str(folder / "state"), "handoff_threshold": 64, "pools": pools}


class Gateway:
    """A gateway process on a fixed port. It is started again when it dies, until `close`."""

    name = GATEWAY

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        self.port = int(free_address().rpartition(":")[2])
        self.log = folder / "gateway.log"
        settings = {"port": self.port, "max_waiting": 1000, "log_requests": "none"}
        file = folder / "gateway.yaml"
        file.write_text(json.dumps({**config, "gateway": settings}))  # JSON is YAML
        self._command = [sys.executable, "-m", "paceline", "serve", "--config", str(file)]
        self._is_closed = False
        self._process = self._start()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._is_closed = True
        self._process.terminate()
        self._thread.join()

    def _start(self) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)

    def _watch(self) -> None:
        while self._process.wait() is not None and not self._is_closed:
            self._process = self._start()


@dataclass(frozen=True)
class Cluster:
    """What faults, checks and reports need of a running cluster."""

    url: str
    """Where clients connect."""
    metrics_url: str
    """The gateway without a link."""
    names: frozenset[str]
    """Workers that are ready if nothing is wrong."""
    pids: Callable[[], dict[str, int]]
    """Process ids of the gateway and of the workers that run, by name."""
    links: list[Link]

    def wait_ready(self, names: Iterable[str]) -> None:
        """Waits until these processes are ready. Raises `TimeoutError`."""

        def are_ready() -> bool:
            page = get(f"{self.metrics_url}/metrics")
            ready = re.findall(r'^paceline_worker_ready{.*worker="([^"]+)".*} 1', page, re.MULTILINE)
            return bool(page) and {GATEWAY, *ready} >= set(names)

        until(are_ready, START_SECONDS, f"{', '.join(names)} to be ready")

    def leaks(self) -> list[str]:
        """What the idle cluster still holds, and orphaned processes."""
        return leaks(lambda: held(self.metrics_url) + orphans())


def leaks(find: Callable[[], list[str]]) -> list[str]:
    """What is still there after a while."""
    with suppress(TimeoutError):
        until(lambda: not find(), IDLE_SECONDS, "an idle cluster")
    return find()


def held(url: str) -> list[str]:
    """Sequences, KV blocks and places of the queue that a gateway counts."""
    page, found = get(f"{url}/metrics"), []
    for name in ("sequences_running", "sequences_waiting", "kv_blocks_used", "queue_choices"):
        if count := sum(map(float, re.findall(rf"^paceline_{name}{{[^}}]*}} (\S+)$", page, re.MULTILINE))):
            found.append(f"{name} {count:g}")
    return found if page else ["no metrics"]


def orphans() -> list[str]:
    """Processes of this run that are not below this process any more."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(RUN) == os.environ[RUN] and os.getpid() not in [
                process.pid,
                *(parent.pid for parent in process.parents()),
            ]:
                found.append(f"process {process.pid} {' '.join(process.cmdline()[:4])}")
    return found


@contextmanager
def local_cluster(config: dict[str, Any], folder: Path) -> Iterator[Cluster]:
    """Workers and a gateway as processes behind links. The gateway finds the links in the state folder."""
    whole: ClusterConfig = cluster_config(config)
    state, specs, stop = StateFolder.of(whole), process_specs(whole), threading.Event()
    with ExitStack() as stack:
        state.acquire()
        stack.callback(state.release)
        supervisor = Supervisor(specs, state.logs)
        supervisor.start()
        thread = threading.Thread(target=supervisor.run, args=(stop,))
        thread.start()
        stack.callback(thread.join)
        stack.callback(stop.set)
        gateway: list[Gateway] = []

        def pids() -> dict[str, int]:
            return supervisor.pids | {one.name: one.pid for one in gateway}

        links = [Link(spec.name, int(spec.address.rpartition(":")[2]), pids) for spec in specs]
        for link in links:
            stack.callback(link.close)
        addresses = {link.name: f"tcp://127.0.0.1:{link.port}" for link in links}
        state.write([spec.member(addresses[spec.name]) for spec in specs])
        gateway.append(Gateway(config, folder))
        stack.callback(gateway[0].close)
        front = Link(GATEWAY, gateway[0].port, dict)
        stack.callback(front.close)
        url, behind = f"http://127.0.0.1:{front.port}", f"http://127.0.0.1:{gateway[0].port}"
        cluster = Cluster(url, behind, frozenset(spec.name for spec in specs), pids, [front, *links])
        cluster.wait_ready(cluster.names)
        yield cluster


@dataclass
class History:
    """Resident memory of one process in MB. A worker that is started again has a new history."""

    name: str
    pid: int
    times: list[float] = field(default_factory=list)
    """Seconds since the start of the log."""
    sizes: list[float] = field(default_factory=list)

    def at(self, seconds: float) -> float | None:
        """Mean size in the minute before this time; None if the process did not live through it."""
        if self.times[0] > seconds - 60 or self.times[-1] < seconds - 60:
            return None
        sizes = [size for time, size in zip(self.times, self.sizes, strict=True) if seconds - 60 <= time <= seconds]
        return sum(sizes) / len(sizes)


class MemoryLog:
    """Samples the processes that `pids` names, on a thread, inside `with`."""

    def __init__(self, pids: Callable[[], dict[str, int]]) -> None:
        self.histories: dict[int, History] = {}
        self._pids, self._began = pids, time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "MemoryLog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def growths(self, seconds: list[float]) -> dict[str, float]:
        """For each process that lived at all these times: the share by which the last size exceeds the first."""
        return {name: sizes[-1] / sizes[0] - 1 for name, sizes in self._sizes(seconds).items()}

    def table(self, seconds: list[float]) -> list[str]:
        """A line for each process that lived at all these times."""
        times = " | ".join(f"minute {second / 60:g}" for second in seconds)
        lines = [f"| process, MB | {times} | growth |", "|---|" + "---|" * len(seconds) + "---|"]
        growths = self.growths(seconds)
        for name, sizes in self._sizes(seconds).items():
            lines.append(f"| {name} | {' | '.join(f'{size:.1f}' for size in sizes)} | {growths[name]:+.1%} |")
        return lines

    def _sizes(self, seconds: list[float]) -> dict[str, list[float]]:
        found = {}
        for history in sorted(self.histories.values(), key=lambda history: (history.name, history.pid)):
            sizes = [size for second in seconds if (size := history.at(second)) is not None]
            if len(sizes) == len(seconds):
                found[history.name] = sizes
        return found

    def _run(self) -> None:
        while True:
            for name, pid in self._pids().items():
                with suppress(psutil.Error):
                    size = psutil.Process(pid).memory_info().rss / 1e6
                    history = self.histories.setdefault(pid, History(name, pid))
                    history.times.append(time.monotonic() - self._began)
                    history.sizes.append(size)
            if self._stop.wait(SAMPLE_SECONDS):
                return


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(1.0)


def get(url: str) -> str:
    """The page; empty if there is none."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return str(response.read().decode())
    except (OSError, ValueError):
        return ""


def shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()

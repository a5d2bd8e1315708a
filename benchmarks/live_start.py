"""Seconds from `paceline scale` to the first token of the new worker: weights from a peer beside weights from disk.

    python benchmarks/live_start.py --repeats 5

A cluster of processes with one target serves a few streams. `paceline scale` starts a second target, which gets streams as soon
as it is ready. Every start has a cluster of its own, and both sources take turns. *Cold*: the file was dropped from the page
cache before; the share that stayed there is printed.
"""

import argparse
import json
import re
import shutil
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from live import LIMITS, gateway
from live_load import Results, Streams, plain_tokens
from live_scenario import Scenario
from weights import cached_share, evict

from paceline.core.cluster_config import cluster_config
from paceline.models.loading.hub import find_model
from paceline.runtime.deploy.deployment import free_address

SOURCES = {"a peer": True, "disk, cold": False}
JOIN_SECONDS = 120.0
READ = re.compile(r"read weights took ([0-9.]+) s")


@dataclass(frozen=True)
class Start:
    """Seconds of one start."""

    ready: float
    """From the command to its end: the worker is ready."""
    first_token: float
    """From the command to the first tokens of the new worker."""
    read: float
    """Time to read weights, as the worker logs it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    starts: dict[str, list[Start]] = {source: [] for source in SOURCES}
    with tempfile.TemporaryDirectory(prefix="live-start-") as name:
        model = _copy(find_model(options.model), Path(name))
        expected = plain_tokens(str(model), 4, options.tokens, 0)
        results = Results()
        for i in range(options.repeats):
            for source, from_peers in SOURCES.items():
                folder = Path(name) / f"{i}-{from_peers}"
                folder.mkdir()
                starts[source].append(_start(model, folder, from_peers, expected, results, options.streams))
                print(source, starts[source][-1], flush=True)
    print(f"\n{results.finished} streams, {len(results.lost)} lost, {len(results.different)} different\n")
    print("| weights from | starts | read weights | until ready | until its first token |\n|---|---:|---:|---:|---:|")
    for source, runs in starts.items():
        cells = (_range([getattr(run, key) for run in runs]) for key in ("read", "ready", "first_token"))
        print(f"| {source} | {len(runs)} | {' | '.join(cells)} |")


def _start(model: Path, folder: Path, from_peers: bool, expected: Any, results: Results, count: int) -> Start:
    """One cluster: up, scale to two, first token, down."""
    port = int(free_address().rpartition(":")[2])
    pool = {"name": "target", "role": "target", "model": str(model), "devices": ["cpu"], "limits": LIMITS}
    document = {
        "name": folder.name,
        "state_dir": str(folder / "state"),
        "weights": {"from_peers": from_peers},
        "gateway": {"log_requests": "none", "log_level": "warning"},
        "pools": [{**pool, "speculation": {"enabled": False}}],
    }
    (folder / "cluster.yaml").write_text(json.dumps(document))
    url = f"http://127.0.0.1:{port}"
    scenario = Scenario(folder, cluster_config(document), [url])
    with ExitStack() as stack:
        scenario.command("up", str(scenario.file))
        stack.callback(scenario.command, "down", str(scenario.file))
        stack.enter_context(gateway(scenario.file, port))
        streams = Streams([url], expected, results, count)
        streams.start()
        stack.callback(streams.join, JOIN_SECONDS)
        time.sleep(2.0)
        if not from_peers:
            for file in _files(model):
                evict(file)
                print(f"{cached_share(file):.0%} of {file.name} in the page cache", flush=True)
        scenario.scale_up("target", 2)
    (label, began, ended), log = scenario.events[1], folder / "state" / "logs" / "target-1.log"
    assert label.startswith("scale")
    found = READ.search(log.read_text())
    return Start(ended - began, scenario.figures["scale to first token of target-1"], float(found[1]) if found else 0.0)


def _copy(model: Path, folder: Path) -> Path:
    """A copy of a GGUF file or of a folder, whose pages no other program holds."""
    if model.is_dir():
        return Path(shutil.copytree(model, folder / "model"))
    return Path(shutil.copy(model, folder / model.name))


def _files(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors")) if model.is_dir() else [model]


def _range(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    main()

"""Start of a second worker with weights from peers or from disk, and its first prompt while layers still arrive.

    python benchmarks/routing/weights.py --repeats 5

Every worker is its own process; the clock starts after its imports. Sources alternate. *Cold*: the worker's copy of
the file is dropped from the page cache; runs in which part of it stayed are left out. In the second table every peer
sends at most `--limit` MB per second.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from paceline.core.config import EngineConfig, SpeculationConfig
from paceline.core.errors import PacelineError
from paceline.core.output import StepOutput
from paceline.core.request import Request, SamplingParams
from paceline.engine.loop import EngineLoop
from paceline.engine.start.build import build_engine
from paceline.model_files.hub.hub import find_model
from paceline.models.loading.streamed import StreamedWeights
from paceline.models.manifest.parts import Piece
from paceline.transfer.weights.loader import WeightManager
from paceline.transfer.weights.server import Activity, WeightServer
from paceline.wire.worker_spec import PeerAddress, WeightSpec

ANY = "tcp://127.0.0.1:0"
SAMPLES = 256


@dataclass(frozen=True)
class Start:
    """The settings of a starting worker."""

    model: str
    peers: tuple[str, ...]
    prompt: int
    whole_first: bool
    """Whether the first request waits for all layers."""


@dataclass(frozen=True)
class Times:
    """Times of a start, in seconds."""

    usable: float
    """The engine accepts requests."""
    layers: int
    """Layers present at that time."""
    last_layer: float
    cpu: float
    """CPU seconds of all threads until then."""
    computed: int
    """Layers that the prompt had passed when the last one arrived."""
    first_token: float
    token: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="a .gguf file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, default=10.0, help="MB per second of each peer, in the second table")
    parser.add_argument("--prompt", type=int, default=384)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:  # set TMPDIR to a disk if this is a memory file system
        model = shutil.copy(find_model(given.model), folder)
        os.sync()
        with source(model, given.limit) as first, source(model, given.limit) as second:
            print(f"{Path(model).name}, {Path(model).stat().st_size / 1e6:.0f} MB, load {os.getloadavg()[0]:.1f}\n")
            ready(model, [first["quick"], second["quick"]], given.repeats)
            early(model, [first["slow"], second["slow"]], given.repeats, given.prompt, given.limit)


def ready(model: str, peers: list[str], repeats: int) -> None:
    contenders = {
        "disk, cold": ((), True),
        "disk, warm": ((), False),
        "one peer": (tuple(peers[:1]), True),
        "two peers": (tuple(peers), True),
    }
    runs: dict[str, list[Times]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, (addresses, cold) in contenders.items():
            times = start(Start(model, addresses, 8, False), cold)
            if times is not None:
                runs[name].append(times)
    check(runs)
    slowest = statistics.median(run.last_layer for run in runs["disk, cold"])
    print(
        "| source | runs | accepts requests | all layers | first token | all layers, speed-up | CPU time until then |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, times in runs.items():
        usable, whole, token, cpu = (
            statistics.median(getattr(run, field) for run in times)
            for field in ("usable", "last_layer", "first_token", "cpu")
        )
        shown = " | ".join(f"{seconds:.2f} s" for seconds in (usable, whole, token))
        print(f"| {name} | {len(times)} | {shown} | {slowest / whole:.2f}x | {cpu:.2f} s |")


def early(model: str, peers: list[str], repeats: int, prompt: int, limit: float) -> None:
    runs: dict[str, list[Times]] = {"as layers come": [], "when all are there": []}
    for _ in range(repeats):
        for name, times in runs.items():
            run = start(Start(model, tuple(peers), prompt, name == "when all are there"), True)
            times += [] if run is None else [run]
    check(runs)
    print(f"\nTwo peers of {limit:g} MB/s each, a prompt of {prompt} tokens:\n")
    print(
        "| prefill | layers at the start | last layer arrived | computed by then | first token | after the last layer |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    for name, times in runs.items():
        middle = sorted(times, key=lambda run: run.first_token)[len(times) // 2]
        gap = statistics.median(run.first_token - run.last_layer for run in times)
        shown = f"{middle.last_layer:.2f} s | {middle.computed} layers | {middle.first_token:.2f} s | {gap:.2f} s"
        print(f"| {name} | {middle.layers} layers | {shown} |")


def check(runs: dict[str, list[Times]]) -> None:
    empty = [name for name, times in runs.items() if not times]
    if empty:
        sys.exit(f"no valid run of {', '.join(empty)}: the file stays in the page cache; is this a memory file system?")
    tokens = {run.token for times in runs.values() for run in times}
    if len(tokens) != 1:
        sys.exit(f"the tokens differ: {tokens}")


@contextmanager
def source(model: str, limit: float) -> Iterator[dict[str, str]]:
    """A process that has the model and serves its weights, with and without a limit."""
    command = [sys.executable, __file__, "--source", model, str(limit)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.stdin.close()


def start(what: Start, cold: bool) -> Times | None:
    """Run one worker; None if the file stayed in the page cache."""
    command = [sys.executable, __file__, "--start", json.dumps(asdict(what))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()  # imports are done
        if cold:
            evict(Path(what.model))
        else:
            Path(what.model).read_bytes()
        was_cold = not cold or cached_share(Path(what.model)) == 0.0
        print("go", file=process.stdin, flush=True)
        answer = process.stdout.readline()
    if not answer:
        sys.exit("a worker failed to start; its error is above")
    return Times(**json.loads(answer)) if was_cold else None


def evict(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def cached_share(path: Path) -> float:
    """Share of the file in the page cache, by sampled reads that do not wait for the disk."""
    size, found = path.stat().st_size, 0
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for i in range(SAMPLES):
            try:
                os.preadv(descriptor, [bytearray(512)], i * (size - 512) // (SAMPLES - 1), os.RWF_NOWAIT)
                found += 1
            except BlockingIOError:
                pass
    finally:
        os.close(descriptor)
    return found / SAMPLES


def be_source(model: str, limit: float) -> None:
    side = WeightManager(WeightSpec(ANY), None)
    engine = build_engine(config(model), load=side.load)
    is_open = threading.Event()
    side.start(is_open.set, Activity)
    is_open.wait()
    loaded = side._loaded
    assert loaded is not None
    slow = WeightServer(ANY, None, limit * 1e6)
    slow.open(side._loader.wait(loaded))
    print(json.dumps({"quick": side.address, "slow": slow.address}), flush=True)
    sys.stdin.read()
    slow.close()
    side.close()
    engine.close()


def be_started(what: dict[str, Any]) -> None:
    start = Start(**what)
    print("imported", flush=True)
    sys.stdin.readline()
    began, computing = time.perf_counter(), time.process_time()
    last: SimpleQueue[tuple[float, float, int]] = SimpleQueue()
    caches: list[tuple[Tensor, Tensor]] = []
    put = StreamedWeights.put

    def noted(self: StreamedWeights, part: int, pieces: Mapping[str, Piece]) -> None:
        put(self, part, pieces)
        if self.is_complete:
            took = time.perf_counter() - began, time.process_time() - computing
            last.put((*took, sum(bool(keys.numpy().any()) for keys, _ in caches)))

    StreamedWeights.put = noted  # type: ignore[method-assign]
    peers = tuple(PeerAddress(f"peer-{i}", address) for i, address in enumerate(start.peers))
    side = WeightManager(WeightSpec(ANY, peers), None)
    loop = EngineLoop(build_engine(config(start.model), load=side.load))
    caches += loop.engine.runner.cache
    usable, progress = time.perf_counter() - began, side.progress
    complete = threading.Event()
    side.start(complete.set, Activity)
    if start.whole_first:
        complete.wait()
    tokens: SimpleQueue[tuple[float, StepOutput | PacelineError]] = SimpleQueue()
    prompt = tuple(1000 + 7 * i % 5000 for i in range(start.prompt))
    request = Request("first", prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    loop.submit(loop.engine.validate(request), lambda event: tokens.put((time.perf_counter() - began, event)))
    first, event = tokens.get()
    assert isinstance(event, StepOutput), event
    there = len(caches) if progress is None or start.whole_first else progress.layers
    times = Times(usable, there, *last.get(), first, event.tokens[0])
    print(json.dumps(asdict(times)), flush=True)
    side.close()
    loop.close()


def config(model: str) -> EngineConfig:
    limits: dict[str, Any] = {"kv_tokens": 1024, "max_num_seqs": 4, "max_batched_tokens": 512, "max_model_len": 512}
    return EngineConfig(model=model, draft=None, device="cpu", speculation=SpeculationConfig(enabled=False), **limits)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--source"]:
        be_source(sys.argv[2], float(sys.argv[3]))
    elif sys.argv[1:2] == ["--start"]:
        be_started(json.loads(sys.argv[2]))
    else:
        main()

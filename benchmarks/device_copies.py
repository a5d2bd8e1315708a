"""KV blocks and weights from one worker to another on the same GPU: in place (CUDA IPC), and through the host.

    python benchmarks/device_copies.py [--model inflate:llama-8b] [--out rows.json]

Two processes share the device. The sending worker has the model, a cached prompt and, in some rows, streams that decode.
Rows are printed as they are measured: gigabytes per second beside a plain copy in device memory, the start of a worker with
weights from the other, and the time per token of the sending worker before and during transfers. The text of the handed-off
prompt should be the sender's. On a CPU there is no memory to read in place, and those rows are left out.
"""

import argparse
import faulthandler
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from device_copies_source import ANY, config, generate, greedy, prompt_ids

from paceline.bench.inflate import make, write_folder
from paceline.cluster.routing.kv_index import PeerHint
from paceline.core.clock import WallClock
from paceline.core.cluster_config import HealthConfig
from paceline.core.errors import PacelineError
from paceline.core.output import StepOutput
from paceline.engine.build import build_engine, pick_device, pick_dtype
from paceline.engine.hooks.imports import PromptImport
from paceline.engine.loop import EngineLoop
from paceline.models.architectures.inflation import Inflation
from paceline.models.loading.weight_manifest import weight_form
from paceline.runtime.handoff.cache_memory import PeerCaches
from paceline.runtime.handoff.prefill_connections import PrefillConnections
from paceline.runtime.handoff.remote_prompt import RemotePrompt
from paceline.runtime.transfer.client import TransferClient
from paceline.runtime.transfer.device_memory import DeviceMemory, device_memory
from paceline.runtime.weights.loader import WeightLoader
from paceline.runtime.weights.manager import WeightManager
from paceline.runtime.weights.peer_source import PeerSource
from paceline.runtime.weights.spec import PeerAddress, WeightSpec
from paceline.runtime.wire.gateway_messages import WorkerAddress

QUIET_SECONDS, BUSY_SECONDS = 1.5, 2.0
"""Time of the streams before a transfer, and least time of transfers."""


class Rows:
    """Measured rows, printed at once and kept for the file."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._began = time.perf_counter()

    def add(self, name: str, **figures: float | str) -> None:
        self.rows.append({"name": name, **figures})
        shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
        print(f"[{time.perf_counter() - self._began:5.1f} s] {name}: {shown}", flush=True)


class Sender:
    """The sending worker."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.first: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the sending worker failed; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, command: str) -> dict[str, Any]:
        print(command, file=self._process.stdin, flush=True)
        return self.read()


class BlockReader:
    """Fetches the sender's cached prompt into the cache of an engine, as a target does, without using it."""

    def __init__(self, loop: EngineLoop, address: str, memory: DeviceMemory | None) -> None:
        self._loop, self._clock = loop, WallClock()
        self._ended: SimpleQueue[tuple[RemotePrompt, int]] = SimpleQueue()
        caches = PeerCaches(loop.engine.runner, memory)
        self._connections = PrefillConnections(
            lambda prompt, blocks: self._ended.put((prompt, blocks)), None, None, HealthConfig(), self._clock, caches
        )
        self._connections.set_workers((), [WorkerAddress("source", address)])
        while self._connections.peer("source") is None:
            time.sleep(0.01)

    def fetch(self, ids: tuple[int, ...], publishes: bool = False) -> tuple[float, int, bool]:
        """Seconds, bytes, and whether they were read in place."""
        found: list[PromptImport | None] = []
        imports, name = self._loop.engine.imports, "publish" if publishes else "fetch"
        self._loop.run(lambda: found.append(imports.reserve(name, ids, "")))
        incoming = found[0]
        if incoming is None:
            raise RuntimeError("the cache is too small for the prompt")
        prompt = RemotePrompt(greedy(name, ids, 8), lambda event: None, ids, PeerHint("source", len(ids)))
        prompt.incoming, prompt.worker, prompt.requested = incoming, "source", self._clock.now()
        prompt.deadline = prompt.requested + 60.0
        began = time.perf_counter()
        self._connections.request(prompt)
        _, blocks = self._ended.get()
        seconds = time.perf_counter() - began
        if blocks != incoming.plan.end:
            raise RuntimeError(f"the hand-off failed: {prompt.reason}")
        end = (lambda: imports.publish(incoming, blocks)) if publishes else (lambda: imports.release(incoming))
        self._loop.run(end)
        return seconds, incoming.plan.num_bytes, incoming.plan.in_place

    def close(self) -> None:
        self._connections.close()


class PartReader:
    """Loads parts of the sender's weights over two connections, as a starting worker does, and drops them."""

    def __init__(self, address: str, device: torch.device, memory: DeviceMemory | None) -> None:
        self._client = TransferClient(None)
        first = PeerSource(PeerAddress("source", address), None, self._client, device, memory)
        first.connect(weight_form(device, pick_dtype("auto", device), None), "")
        self._peers = [first, first.duplicate()]
        self.is_in_place = first.is_in_place
        self.parts = list(range(1, len(first.manifest.parts)))
        self._sizes = [part.nbytes for part in first.manifest.parts]

    def load(self, parts: list[int]) -> int:
        """Bytes of the parts."""

        def run(number: int) -> None:
            for part in parts[number :: len(self._peers)]:
                self._peers[number].load(part, threading.Event())

        with ThreadPoolExecutor(len(self._peers)) as pool:
            list(pool.map(run, range(len(self._peers))))
        return sum(self._sizes[part] for part in parts)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._client.close()


@contextmanager
def sender(options: argparse.Namespace) -> Iterator[Sender]:
    command = [sys.executable, str(Path(__file__).with_name("device_copies_source.py"))]
    for name in ("model", "device", "prompt", "limit"):
        command += [f"--{name}", str(getattr(options, name))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Sender(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()


def plain_copy(rows: Rows, device: torch.device) -> None:
    """One copy in device memory, of the bytes of a prompt's blocks, and of large tensors."""
    for size in (64 << 20, 1 << 30):
        source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
        times = []
        for _ in range(10):
            synchronise(device)
            began = time.perf_counter()
            target.copy_(source)
            synchronise(device)
            times.append(time.perf_counter() - began)
        rows.add(f"plain device copy of {size >> 20} MiB", gb_per_s=size / statistics.median(times) / 1e9)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_worker(
    rows: Rows, options: argparse.Namespace, source: Sender, channels: tuple[str, ...] | None = None
) -> EngineLoop:
    """A worker that loads all its weights from the sender, and its first token."""
    before, address, size = source.ask("bytes")["in_place"], source.first["weights"], source.first["bytes"]
    began, loaded = time.perf_counter(), SimpleQueue[float]()
    manager = WeightManager(WeightSpec(ANY, (PeerAddress("source", address),)), None, channels)
    loop = EngineLoop(build_engine(config(options), load=manager.load))
    usable = time.perf_counter() - began
    waiting = threading.Thread(target=lambda: (manager.wait(), loaded.put(time.perf_counter() - began)))
    waiting.start()
    first: SimpleQueue[float] = SimpleQueue()

    def listen(event: StepOutput | PacelineError) -> None:
        if isinstance(event, PacelineError):
            raise event
        first.put(time.perf_counter() - began)

    loop.submit(greedy("first", prompt_ids(16), 1), listen)
    token = first.get()
    waiting.join()
    in_place = source.ask("bytes")["in_place"] - before
    rows.add(
        f"start with weights {'in place' if in_place else 'through the host'}",
        gigabytes=size / 1e9,
        engine_s=usable,
        all_weights_s=loaded.get(),
        first_token_s=token,
    )
    manager.close()
    return loop


def effect(rows: Rows, name: str, source: Sender, streams: int, transfer: Callable[[], int]) -> None:
    """Time per token of the sender's streams before and during transfers."""
    source.ask(f"decode {streams}")
    quiet_from = time.perf_counter()
    time.sleep(QUIET_SECONDS)
    began, moved = time.perf_counter(), 0
    while time.perf_counter() < began + BUSY_SECONDS:
        moved += transfer()
    ended = time.perf_counter()
    times = source.ask("end")["times"]
    quiet, busy = gaps(times, quiet_from, began), gaps(times, began, ended)
    if not quiet or not busy:
        rows.add(f"sender's streams during {name}", note="too few tokens")
        return
    rows.add(
        f"sender's {streams} streams during {name}",
        gb_per_s=moved / (ended - began) / 1e9,
        tpot_ms_quiet=1e3 * statistics.mean(quiet),
        tpot_ms=1e3 * statistics.mean(busy),
        slowdown=statistics.mean(busy) / statistics.mean(quiet),
        p99_ms_quiet=1e3 * percentile(quiet, 0.99),
        p99_ms=1e3 * percentile(busy, 0.99),
    )


def gaps(times: list[list[float]], start: float, end: float) -> list[float]:
    """Seconds between tokens of each stream."""
    return [b - a for stream in times for a, b in pairwise(stream) if start <= a and b <= end and b > a]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def from_disk(rows: Rows, options: argparse.Namespace, device: torch.device) -> None:
    """Weights of a checkpoint in the page cache."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        dtype = pick_dtype("auto", device)
        size = write_folder(make(Inflation.parse(options.disk), device, dtype), path)
        loader = WeightLoader((), None)
        began = time.perf_counter()
        loader.wait(loader.load(str(path), device, dtype, None))
        synchronise(device)
        seconds = time.perf_counter() - began
        loader.close()
        rows.add(f"weights from the page cache, {options.disk}", gigabytes=size / 1e9, gb_per_s=size / seconds / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="inflate:llama-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompt", type=int, default=4097, help="tokens of the cached prompt")
    parser.add_argument(
        "--streams", type=int, default=4, help="streams of the sender in the rows of its time per token"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--host-parts", type=int, default=6, help="parts of the weights to send through the host")
    parser.add_argument("--host-start", action="store_true", help="also start a worker with weights through the host")
    parser.add_argument("--disk", default="inflate:llama-1b", help="model to write and read; empty: none")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which a run that hangs is ended")
    parser.add_argument("--out", type=Path, help="file of the rows, as JSON")
    options = parser.parse_args()
    rows, device = Rows(), pick_device(options.device)
    options.device = str(device)
    faulthandler.dump_traceback_later(options.limit, exit=True)
    try:
        with sender(options) as source:
            measure(rows, options, device, source)
    finally:
        if options.out is not None:
            options.out.write_text(json.dumps(rows.rows, indent=1) + "\n")


def measure(rows: Rows, options: argparse.Namespace, device: torch.device, source: Sender) -> None:
    plain_copy(rows, device)
    if options.disk:
        from_disk(rows, options, device)
    source.first = first = source.read()
    rows.add("sender is ready", gigabytes=first["bytes"] / 1e9)
    memory = device_memory(device, None)
    ids = prompt_ids(options.prompt)
    loop = start_worker(rows, options, source)
    if options.host_start:
        start_worker(rows, options, source, ("socket",)).close()
    ways = [("in place", memory), ("through the host", None)] if memory is not None else [("through the host", None)]
    for way, one in ways:
        blocks, parts = BlockReader(loop, first["address"], one), PartReader(first["weights"], device, one)
        if (way == "in place") != parts.is_in_place:
            rows.add("in place", note="the other process's memory cannot be mapped here")
            continue
        chosen = parts.parts if parts.is_in_place else parts.parts[: options.host_parts]
        runs = [blocks.fetch(ids) for _ in range(options.repeats + 1)][1:]
        seconds, size, in_place = sorted(runs)[len(runs) // 2]
        rows.add(
            f"KV hand-off {way}", megabytes=size / 1e6, ms=1e3 * seconds, gb_per_s=size / seconds / 1e9, read=in_place
        )
        began = time.perf_counter()
        moved = sum(parts.load(chosen) for _ in range(3 if parts.is_in_place else 1))
        rows.add(f"weights {way}, verified", gb_per_s=moved / (time.perf_counter() - began) / 1e9)
        effect(rows, f"KV hand-offs {way}", source, options.streams, lambda blocks=blocks: blocks.fetch(ids)[1])  # type: ignore[misc]
        few = chosen if parts.is_in_place else chosen[:2]
        effect(rows, f"weights {way}", source, options.streams, lambda parts=parts, few=few: parts.load(few))  # type: ignore[misc]
        if way == ways[0][0]:
            blocks.fetch(ids, publishes=True)
            text = generate(loop, greedy("publish", ids, 8))
            rows.add("text of the prompt", same=str(text == first["tokens"]))
        blocks.close()
        parts.close()
    loop.close()


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        os._exit(1)  # other threads would keep the process

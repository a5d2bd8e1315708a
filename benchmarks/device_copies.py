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
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from device_copies_readers import BlockReader, PartReader, Sender, sender
from device_copies_source import ANY, config, generate, greedy, prompt_ids

from paceline.bench.inflate import make, write_folder
from paceline.core.errors import PacelineError
from paceline.core.output import StepOutput
from paceline.engine.build import build_engine, pick_device, pick_dtype
from paceline.engine.loop import EngineLoop
from paceline.models.architectures.inflation import Inflation
from paceline.runtime.transfer.device_memory import DeviceMemory, device_memory
from paceline.runtime.weights.loader import WeightLoader
from paceline.runtime.weights.manager import WeightManager
from paceline.runtime.weights.spec import PeerAddress, WeightSpec

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

    def attempt(self, name: str, measure: Callable[[], None]) -> None:
        """Measure, or say why that failed and continue."""
        try:
            measure()
        except Exception as error:
            traceback.print_exc()
            self.add(name, failed=repr(error)[:300])


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


def write(name: str, device: torch.device, folder: Path) -> int:
    """Write an inflated model; returns its bytes."""
    return write_folder(make(Inflation.parse(name), device, pick_dtype("auto", device)), folder)


def from_disk(rows: Rows, name: str, folder: Path, device: torch.device, size: int) -> None:
    """Weights of a checkpoint in the page cache."""
    loader = WeightLoader((), None)
    began = time.perf_counter()
    loader.wait(loader.load(str(folder), device, pick_dtype("auto", device), None))
    synchronise(device)
    seconds = time.perf_counter() - began
    loader.close()
    rows.add(f"weights from the page cache, {name}", gigabytes=size / 1e9, gb_per_s=size / seconds / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="inflate:llama-8b")
    parser.add_argument("--base", help="small model of the inflated ones: a .gguf file; default: the embedded model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompt", type=int, default=4097, help="tokens of the cached prompt")
    parser.add_argument(
        "--streams", type=int, default=4, help="streams of the sender in the rows of its time per token"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--host-parts", type=int, default=6, help="parts of the weights to send through the host")
    parser.add_argument("--host-rounds", type=int, default=1, help="times that these parts are sent")
    parser.add_argument("--host-start", action="store_true", help="also start a worker with weights through the host")
    parser.add_argument("--disk", default="inflate:llama-1b", help="model to write and read; empty: none")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which a run that hangs is ended")
    parser.add_argument("--out", type=Path, help="file of the rows, as JSON")
    options = parser.parse_args()
    rows, device = Rows(), pick_device(options.device)
    options.device = str(device)
    if options.base:
        for name in ("model", "disk"):
            if getattr(options, name).startswith("inflate:"):
                setattr(options, name, f"{getattr(options, name)}?base={options.base}")
    faulthandler.dump_traceback_later(options.limit, exit=True)
    try:
        with tempfile.TemporaryDirectory() as folder, sender(options) as source:
            path, sizes = Path(folder) / "model", list[int]()
            if options.disk:  # while the sender starts
                rows.attempt("write a checkpoint", lambda: sizes.append(write(options.disk, device, path)))
            source.first = source.read()
            rows.add("sender is ready", gigabytes=source.first["bytes"] / 1e9)
            plain_copy(rows, device)
            for size in sizes:
                rows.attempt("page cache", lambda size=size: from_disk(rows, options.disk, path, device, size))  # type: ignore[misc]
            measure(rows, options, device, source)
    finally:
        if options.out is not None:
            options.out.write_text(json.dumps(rows.rows, indent=1) + "\n")


def measure(rows: Rows, options: argparse.Namespace, device: torch.device, source: Sender) -> None:
    memory, ids = device_memory(device, None), prompt_ids(options.prompt)
    loop = start_worker(rows, options, source)
    if options.host_start:
        rows.attempt("start through the host", lambda: start_worker(rows, options, source, ("socket",)).close())
    ways = [("in place", memory), ("through the host", None)] if memory is not None else [("through the host", None)]
    for way, one in ways:

        def both(way: str = way, one: DeviceMemory | None = one) -> None:
            compare(rows, options, source, BlockReader(loop, source.first["address"], one), way)
            load(rows, options, source, PartReader(source.first["weights"], device, one), way)

        rows.attempt(way, both)
    reader = BlockReader(loop, source.first["address"], ways[0][1])
    reader.fetch(ids, publishes=True)
    rows.add("text of the prompt", same=str(generate(loop, greedy("publish", ids, 8)) == source.first["tokens"]))
    reader.close()
    loop.close()


def compare(rows: Rows, options: argparse.Namespace, source: Sender, blocks: BlockReader, way: str) -> None:
    """Hand-offs of the cached prompt."""
    ids = prompt_ids(options.prompt)
    runs = [blocks.fetch(ids) for _ in range(options.repeats + 1)][1:]
    seconds, size, in_place = sorted(runs)[len(runs) // 2]
    figures = {"megabytes": size / 1e6, "ms": 1e3 * seconds, "gb_per_s": size / seconds / 1e9}
    rows.add(f"KV hand-off {way}", **figures, read_in_place=str(in_place))
    effect(rows, f"KV hand-offs {way}", source, options.streams, lambda: blocks.fetch(ids)[1])
    blocks.close()


def load(rows: Rows, options: argparse.Namespace, source: Sender, parts: PartReader, way: str) -> None:
    """Weights, all of them in place, and some parts through the host."""
    chosen = parts.parts if parts.is_in_place else parts.parts[: options.host_parts]
    parts.load(chosen[:2])  # opens the channels
    began = time.perf_counter()
    moved = sum(parts.load(chosen) for _ in range(3 if parts.is_in_place else options.host_rounds))
    seconds = time.perf_counter() - began
    rows.add(f"weights {way}, verified", gb_per_s=moved / seconds / 1e9, read_in_place=str(parts.is_in_place))
    few = chosen if parts.is_in_place else chosen[:2]
    effect(rows, f"weights {way}", source, options.streams, lambda: parts.load(few))
    parts.close()


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        os._exit(1)  # other threads would keep the process

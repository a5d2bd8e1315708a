"""Drafting beside verification on one GPU: what a partition of the multiprocessors (CUDA green contexts) could reach.

    python benchmarks/green_contexts.py --shape llama-8b --base MODEL.gguf --out FOLDER
    python benchmarks/green_contexts.py --shape llama-70b --quantization fp8 --tokens 4.4 --base MODEL.gguf --out FOLDER

The target's verification of one stream and the steps of a draft model are captured as CUDA graphs, each on the stream of its
partition, and timed alone, one after the other, and at once. Drafting ahead prepares several outcomes of the verification;
`READY` has the measured share of rounds whose outcome is among them (benchmarks/pools.md). The other rounds draft after the
verification, on the whole GPU. From these times follows the rate that the arrangement could reach:

    today:        tokens / (pass + draft)
    partitions:   tokens / (max(pass beside drafts, drafts beside the pass) + (1 - ready) draft)

A partition that cannot be made or captured is reported, and the next one is tried.
"""

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from paceline.engine.build import pick_device, pick_dtype, pick_quantization
from paceline.engine.executors.graph.rows import ChainRows
from paceline.models.gpu.runner import GpuRunner
from paceline.models.loading.load import load_model

READY = {1: 0.4, 5: 0.75, 11: 0.87}
"""Share of rounds whose outcome is prepared, by number of prepared outcomes; depth 5, noisy copy, greedy."""
CONTEXT = 256
"""Tokens of a sequence."""
REPEATS = 15
RESOURCE_BYTES, COUNT_OFFSET = 144, 96
"""Size of a CUdevResource, and where its number of multiprocessors is."""
SM_RESOURCE, ANY_COUNT, NON_BLOCKING, DEFAULT_STREAM = 1, 1, 1, 1
"""CU_DEV_RESOURCE_TYPE_SM, CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING, CU_STREAM_NON_BLOCKING and
CU_GREEN_CTX_DEFAULT_STREAM"""


class Driver:
    """The few calls of the CUDA driver that torch does not have for two partitions without overlap."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: error {code}, {(text.value or b'').decode()}")

    def split(self, count: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream, int, int]:
        """Streams of a partition of at least `count` multiprocessors and of one with the rest, and the size of each."""
        device, groups = ctypes.c_int(), ctypes.c_uint(1)
        whole, first, rest = (ctypes.create_string_buffer(RESOURCE_BYTES) for _ in range(3))
        self.call("cuDeviceGet", ctypes.byref(device), torch.cuda.current_device())
        self.call("cuDeviceGetDevResource", device, whole, SM_RESOURCE)
        self.call("cuDevSmResourceSplitByCount", first, ctypes.byref(groups), whole, rest, ANY_COUNT, count)
        return self._stream(first, device), self._stream(rest, device), _count(first), _count(rest)

    def _stream(self, resource: ctypes.Array[ctypes.c_char], device: ctypes.c_int) -> torch.cuda.Stream:
        description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuDevResourceGenerateDesc", ctypes.byref(description), resource, 1)
        self.call("cuGreenCtxCreate", ctypes.byref(context), description, device, DEFAULT_STREAM)
        self.call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, NON_BLOCKING, 0)
        return torch.cuda.ExternalStream(stream.value)


def _count(resource: ctypes.Array[ctypes.c_char]) -> int:
    return int.from_bytes(resource.raw[COUNT_OFFSET : COUNT_OFFSET + 4], "little")


class Chains:
    """Passes of one model over `batch` sequences with `rows` new tokens each. With `steps` above 1 every pass takes the tokens
    that the pass before has chosen."""

    def __init__(self, runner: GpuRunner, batch: int, rows: int, steps: int = 1) -> None:
        device, width = runner.device, runner.table_width
        self._steps = steps
        blocks = -(-(CONTEXT + rows + steps) // 16)
        own = torch.arange(batch * blocks, device=device, dtype=torch.int32).view(batch, blocks) % runner.num_blocks
        tables = torch.zeros(batch, width, dtype=torch.int32, device=device)
        tables[:, :blocks] = own
        self._rows = ChainRows(runner, tables, batch, rows)
        self._tokens = torch.full((batch * rows,), 1000, dtype=torch.int64, device=device)
        self._lengths = torch.full((batch,), CONTEXT, dtype=torch.int32, device=device)

    @torch.inference_mode()
    def __call__(self) -> None:
        tokens = self._tokens
        for step in range(self._steps):
            logits = self._rows.forward(tokens, self._lengths, step).logits
            assert logits is not None
            if self._steps > 1:
                tokens = logits.argmax(1)


Replay = Callable[[], None]
Streams = tuple[torch.cuda.Stream, torch.cuda.Stream]


class Captured:
    """The work as a graph that runs on a stream. It keeps the work: the graph has the addresses of its tensors only."""

    def __init__(self, work: Chains, stream: torch.cuda.Stream) -> None:
        self._work, self._stream = work, stream
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()  # the tensors of the work are filled on another stream
        with torch.cuda.stream(stream):
            work()
            stream.synchronize()
            with torch.cuda.graph(self._graph, stream=stream):
                work()

    def __call__(self) -> None:
        with torch.cuda.stream(self._stream):
            self._graph.replay()


def captured(work: Chains, stream: torch.cuda.Stream | None) -> Replay:
    """Runs the work on a stream as a graph; without a stream, at once."""
    if stream is not None:
        return Captured(work, stream)
    work()
    return work


def milliseconds(*parts: tuple[Replay, torch.cuda.Stream | None]) -> float:
    """Time from the launch of all parts until the first of them ends."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for launch, _ in parts:
            launch()
        first = parts[0][1]
        if first is not None:
            first.synchronize()
        times.append(time.perf_counter() - began)
        if first is not None:
            torch.cuda.synchronize()
    return 1e3 * median(times[3:])


@dataclass(frozen=True)
class Row:
    partition: str
    branches: int
    pass_ms: float
    """The target's pass alone, on the partition."""
    drafts_ms: float
    """The drafts of all branches alone, on the partition."""
    pass_beside_ms: float
    drafts_beside_ms: float
    rate: float
    """Tokens per second that the arrangement could reach."""


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, pick_device(options.device)
        dtype = pick_dtype("auto", self.device)
        model = options.base
        if options.shape != "none":
            model = f"inflate:{options.shape}?base={options.base}&noise=0.05"
        target = load_model(model, self.device, dtype, pick_quantization(options.quantization)).model
        draft = load_model(options.base, self.device, dtype).model
        blocks = max(READY) * (-(-(CONTEXT + 2 * options.depth) // 16) + 1)
        self._target, self._draft = GpuRunner(target, blocks), GpuRunner(draft, blocks)
        self.rows: list[Row] = []

    def whole(self) -> tuple[float, float]:
        """(pass, drafts of one sequence) in milliseconds, one after the other on the whole GPU."""
        stream = torch.cuda.Stream() if self.device.type == "cuda" else None
        verify = captured(Chains(self._target, 1, 1 + self.options.depth), stream)
        draft = captured(Chains(self._draft, 1, 1, self.options.depth), stream)
        return milliseconds((verify, stream)), milliseconds((draft, stream))

    def partition(self, name: str, streams: Streams | tuple[None, None], draft_ms: float) -> None:
        verify = captured(Chains(self._target, 1, 1 + self.options.depth), streams[0])
        for branches, ready in READY.items():
            # The token after full acceptance takes a step of its own
            drafts = captured(Chains(self._draft, branches, 1, self.options.depth + 1), streams[1])
            ours, theirs = (verify, streams[0]), (drafts, streams[1])
            pass_beside, drafts_beside = milliseconds(ours, theirs), milliseconds(theirs, ours)
            seconds = 1e-3 * (max(pass_beside, drafts_beside) + (1.0 - ready) * draft_ms)
            alone = milliseconds(ours), milliseconds(theirs)
            row = Row(name, branches, *alone, pass_beside, drafts_beside, self.options.tokens / seconds)
            self.rows.append(row)
            figures = " | ".join(f"{value:.2f}" for value in (*alone, pass_beside, drafts_beside))
            print(f"| {name} | {branches} | {figures} | {row.rate:.1f} |", flush=True)


def run(options: argparse.Namespace) -> int:
    began = time.perf_counter()
    bench = Bench(options)
    pass_ms, draft_ms = bench.whole()
    today = 1e3 * options.tokens / (pass_ms + draft_ms)
    print(f"{options.shape}, depth {options.depth}, {options.tokens} tokens a round; ready after ", end="")
    print(f"{time.perf_counter() - began:.0f} s\n")
    print("| partition | outcomes | pass ms | drafts ms | pass beside drafts ms | drafts beside pass ms | tok/s |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    print(f"| whole GPU, one after the other | | {pass_ms:.2f} | {draft_ms:.2f} | | | {today:.1f} |", flush=True)
    is_gpu = bench.device.type == "cuda"
    bench_of: dict[str, Callable[[], tuple[str, Streams | tuple[None, None]]]] = {
        "two streams": lambda: (
            "two streams",
            (torch.cuda.Stream(), torch.cuda.Stream(priority=-1)) if is_gpu else (None, None),
        )
    }
    for count in options.partitions:
        bench_of[f"partition of {count}"] = lambda count=count: _partition(count)
    failures = []
    for name, streams_of in bench_of.items():
        if time.perf_counter() - began > options.seconds:
            failures.append(f"{name}: no time left")
            continue
        try:
            bench.partition(*streams_of(), draft_ms)
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    print("\n".join(["", *failures]), flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        figures = {
            "pass_ms": pass_ms,
            "draft_ms": draft_ms,
            "today": today,
            "rows": [asdict(row) for row in bench.rows],
        }
        document = {"shape": options.shape, "depth": options.depth, **figures, "failures": failures}
        (options.out / f"green_contexts_{options.shape}.json").write_text(json.dumps(document, indent=1))
    return 0


def _partition(count: int) -> tuple[str, Streams]:
    target, draft, size, rest = Driver().split(count)
    return f"{size} + {rest} multiprocessors", (target, draft)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="smollm2", help="the draft, and the base of the target")
    parser.add_argument("--shape", default="llama-8b", help="none: the base itself")
    parser.add_argument("--quantization", default="none", help="of the target")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--tokens", type=float, default=3.5, help="tokens of a round")
    parser.add_argument(
        "--partitions", type=int, nargs="+", default=[108, 116, 124], help="multiprocessors of the target"
    )
    parser.add_argument("--seconds", type=float, default=50.0, help="time after which no partition is tried")
    parser.add_argument("--out", type=Path)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())

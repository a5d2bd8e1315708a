"""Time of the kernels of one decoding step of a small model on a GPU: where the time of a draft goes.

    python benchmarks/draft_step.py [--batches 1 8 32] [--context 500] [--rows 1]
    python benchmarks/draft_step.py --tune src/paceline/kernels/gpu/tiles.json --class 64 --seconds 90

The model has the shape of SmolLM2-135M and random weights. Printed are the time of a captured pass, then of its kernels by
name, from the profiler: microseconds per pass, and the number of launches. Kernels overlap and the profiler separates them,
so that they add up to more than the pass takes.

With `--tune`, tiles of up to 16 rows (`--class 16`) or of 17 to 64 are replaced one matrix after the other wherever the whole
pass becomes faster, and written to the file. `tune_linear.py` times a kernel alone, where the next one does not start before it
ends. Passes of one and of 8 sequences count, or of 32; with one row twice, with two rows once.
"""

import argparse
import json
import multiprocessing
import time
from collections import defaultdict
from dataclasses import astuple
from itertools import product
from pathlib import Path
from statistics import mean, median

import torch
from gpu_families_models import RandomModel, Shape
from torch.profiler import ProfilerActivity, profile
from tune_linear import Chain, weight_of
from tune_linear_cases import Case, Work, cases_of

from paceline.kernels.gpu import tiles
from paceline.kernels.gpu.linear import Normed
from paceline.kernels.gpu.tiles import RowClass, Tile
from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.architectures.config import ModelConfig
from paceline.models.cuda_graph import StreamTimer
from paceline.models.gpu.forward_pass import PassGraph, PassKind
from paceline.models.gpu.runner import GpuRunner
from paceline.models.runner import Span

CONFIG = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    }
)  # fmt: skip
RUNS = 20
SIZES = {RowClass.UP_TO_16: ((1, 1), (1, 2), (8, 1), (8, 1), (8, 2)), RowClass.UP_TO_64: ((32, 1), (32, 1), (32, 2))}
"""(sequences, rows of each) of the passes that a tile should make faster."""


def graph_of(runner: GpuRunner, batch: int, rows: int, context: int) -> PassGraph:
    """A captured pass, with its inputs set."""
    each = -(-(context + rows) // BLOCK_SIZE)
    spans = [Span(range(i * each, (i + 1) * each), context, [1] * rows, rows) for i in range(batch)]
    graph = PassGraph(runner.context, batch, rows, PassKind())
    graph.run(spans)
    return graph


def seconds(graph: PassGraph, device: torch.device) -> float:
    times = []
    for _ in range(RUNS):
        graph.replay()  # the next one does not wait for the host
        timer = StreamTimer(device)
        graph.replay()
        times.append(timer.seconds())
    return median(times)


def kernels(graph: PassGraph) -> dict[str, tuple[float, int]]:
    """Microseconds and launches of a pass by kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(RUNS):
            graph.replay()
        torch.cuda.synchronize()
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for event in seen.key_averages():
        found[event.key[:48]] = (event.device_time_total / RUNS, event.count // RUNS)
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


def candidates(case: Case) -> list[Tile]:
    """Tiles of one matrix to try."""
    splits = (1,) if case.is_paired else (1, 2, 4) if case.inputs > 1024 else (1, 3)
    shapes = ((16, 1), (16, 2), (16, 4), (32, 1), (32, 2), (32, 4))
    columns = ((64, 5), (64, 9), (128, 3), (128, 5), (256, 3))
    return [
        Tile(outputs, inputs, warps, stages, splits=split)
        for (outputs, warps), (inputs, stages), split in product(shapes, columns, splits)
        if outputs == 16 or case.is_paired  # the kernels after a sum depend on the number of its strips
    ]


def compile_some(work: Work) -> int:
    """Compile these tiles as a pass uses them: the norm of the first layer has one strip, the others as many as tiles."""
    case, chain = work.case, Chain(work.case, work.rows, [weight_of(work.case)])
    for parts, tile in product((1, -(-CONFIG.hidden_size // 16)) if case.is_paired else (1,), work.tiles):
        chain.normed = Normed(chain.x, torch.ones(work.rows, parts, device="cuda"), CONFIG.rms_eps)
        try:
            chain.call(chain.weights[0], tile)
        except Exception as error:
            print(case.name, tile, type(error).__name__, flush=True)
    torch.cuda.synchronize()
    return len(work.tiles)


def compile_all(cases: list[Case], limit: float) -> None:
    """Compile all candidates in parallel, within about `limit` seconds."""
    began = time.perf_counter()
    tasks = [Work(case, rows, tuple(candidates(case)[i::8])) for case in cases for rows in case.rows for i in range(8)]
    with multiprocessing.get_context("spawn").Pool(15) as pool:
        results, done = pool.imap_unordered(compile_some, tasks), 0
        try:
            for _ in tasks:
                done += results.next(max(0.0, limit - (time.perf_counter() - began)))
        except multiprocessing.TimeoutError:
            print("no time left to compile the other tiles", flush=True)
    print(f"compiled {done} tiles in {time.perf_counter() - began:.0f} s", flush=True)


def tune(runner: GpuRunner, context: int, file: Path, row_class: RowClass, limit: float) -> None:
    """Replace tiles of one class in `file` within `limit` seconds."""
    began, device = time.perf_counter(), runner.device
    cases = cases_of(["135m"], [row_class], is_quick=True)
    compile_all(cases, 0.5 * limit)

    def cost() -> float:
        return mean(seconds(graph_of(runner, *size, context), device) for size in SIZES[row_class])

    known, best = tiles._measured(), cost()
    print(f"at first {1e6 * best:.0f} us", flush=True)
    for case in cases:
        key, before = case.key, known.get(case.key)
        chosen = before
        for tile in candidates(case):
            if time.perf_counter() - began > limit:
                break
            known[key] = tile
            try:
                found = cost()
            except Exception as error:
                print(case.name, tile, type(error).__name__, flush=True)
                continue
            if found < 0.995 * best:
                best, chosen = found, tile
        if chosen is not None:
            known[key] = chosen
        print(f"{case.name}: {before} -> {chosen}: {1e6 * best:.0f} us", flush=True)
    content = json.loads(file.read_text()) | {key: list(astuple(tile)) for key, tile in known.items()}
    file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=500)
    parser.add_argument("--rows", type=int, default=1, help="rows of each sequence; the first step of a round has 2")
    parser.add_argument("--tune", type=Path, help="file of tiles to improve")
    parser.add_argument(
        "--class", dest="row_class", type=int, choices=(16, 64), default=64, help="most rows of --tune's tiles"
    )
    parser.add_argument("--seconds", type=float, default=90.0, help="limit of --tune")
    options = parser.parse_args()
    device = torch.device("cuda")
    model = RandomModel(Shape(CONFIG, None), None, 1.0, device).model
    most = max(options.batches) * -(-(options.context + options.rows) // BLOCK_SIZE)
    runner = GpuRunner(model, 2 * most)
    if options.tune:
        row_class = RowClass.UP_TO_16 if options.row_class == 16 else RowClass.UP_TO_64
        tune(runner, options.context, options.tune, row_class, options.seconds)
        return
    for batch in options.batches:
        graph = graph_of(runner, batch, options.rows, options.context)
        print(f"\n{batch} sequences, {1e6 * seconds(graph, device):.0f} us a pass")
        for name, (took, count) in kernels(graph).items():
            print(f"  {name:48} {took:8.1f} us, {count:4} launches, {took / max(1, count):6.2f} us each")


if __name__ == "__main__":
    main()

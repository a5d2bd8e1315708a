"""Time of passes of a tensor-parallel model on one GPU, in a world of one rank over NCCL.

    python benchmarks/rank_passes.py --base MODEL.gguf

Milliseconds of one pass of the 8B shape: without ranks, with one rank whose passes are CUDA graphs, and with one rank that
launches every kernel. Device time for graphs, wall time otherwise.
"""

import argparse
from collections.abc import Sequence
from statistics import median

import torch

from paceline.core.clock import WallClock
from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.architectures.llama import DecoderModel
from paceline.models.gpu.ranks.runner import ParallelGpuRunner
from paceline.models.gpu.runner import GpuRunner
from paceline.models.loading.load import load_model
from paceline.models.parallel.commands import RankSpec
from paceline.models.parallel.runner import ParallelRunner, load_parallel
from paceline.models.runner import ModelRunner, Span

CONTEXT, BLOCKS_EACH = 300, 20
SIZES = (1, 1), (1, 5), (8, 1), (8, 5), (32, 1), (32, 5), (64, 1)
"""Sequences, rows of each."""
REPEATS = 7


def spans(count: int, rows: int) -> list[Span]:
    blocks = [range(i * BLOCKS_EACH, (i + 1) * BLOCKS_EACH) for i in range(count)]
    return [Span(each, CONTEXT, [7] * rows, rows) for each in blocks]


def measure(runner: ModelRunner) -> list[float]:
    """Milliseconds for each of SIZES."""
    found = []
    for count, rows in SIZES:
        runner.forward(spans(count, rows))
        found.append(1e3 * median(runner.measure_seconds(spans(count, rows), WallClock()) for _ in range(REPEATS)))
    return found


def print_table(names: Sequence[str], columns: Sequence[Sequence[float]]) -> None:
    print(f"| sequences | rows of each | {' | '.join(names)} |")
    print("|---:|---:|" + "---:|" * len(names))
    for (count, rows), *times in zip(SIZES, *columns, strict=True):
        print(f"| {count} | {rows} | {' | '.join(f'{time:.2f}' for time in times)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="GGUF file of the model that is inflated")
    parser.add_argument("--shape", default="llama-8b")
    options = parser.parse_args()
    name, device = f"inflate:{options.shape}?base={options.base}", torch.device("cuda", 0)
    num_blocks = BLOCKS_EACH * max(count for count, _ in SIZES)
    assert CONTEXT + max(rows for _, rows in SIZES) <= BLOCKS_EACH * BLOCK_SIZE
    whole: DecoderModel = load_model(name, device, torch.bfloat16, None).model
    alone = measure(GpuRunner(whole, num_blocks))
    del whole
    torch.cuda.empty_cache()
    loaded, ranks = load_parallel(RankSpec(name, 1, device, torch.bfloat16))
    graphs = measure(ParallelGpuRunner(loaded.model, num_blocks, ranks))
    launches = measure(ParallelRunner(loaded.model, num_blocks, ranks))
    ranks.close()
    print_table(("no ranks, graphs", "one rank, graphs", "one rank, kernel by kernel"), (alone, graphs, launches))


if __name__ == "__main__":
    main()

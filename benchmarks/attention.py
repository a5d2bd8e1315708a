"""Time of paged attention on a GPU beside the time to read the keys and values once.

    python benchmarks/attention.py

Sequences of one length; the kernels of several layers run in one CUDA graph, each with its own cold cache.
"""

import argparse
from statistics import median

import torch

from paceline.kernels.gpu.attention import paged_attention
from paceline.kernels.gpu.attention_plan import attention_plan
from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.cuda_graph import Graph, GraphPool, StreamTimer

BANDWIDTH = 4.3e12
"""Bytes per second of a large copy on an H200."""
COLD_BYTES = 400_000_000
CASES = (
    *((count, 1, 340) for count in (64, 128, 256)),
    *((count, rows, context) for context in (8192, 32768) for count, rows in ((1, 1), (8, 1), (8, 5))),
)
"""Sequences, rows of each, tokens of context."""


def measure(count: int, rows: int, context: int, heads: int, kv_heads: int, width: int) -> tuple[float, float]:
    """Seconds of one layer, and of reading its keys and values."""
    device, blocks_each = torch.device("cuda"), -(-(context + rows) // BLOCK_SIZE)
    shape = count * blocks_each, BLOCK_SIZE, kv_heads, width
    num_bytes = 2 * count * (context + rows) * kv_heads * width * 2
    num_layers = max(2, COLD_BYTES // num_bytes)
    layers = [[torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2)] for _ in range(num_layers)]
    q = torch.randn(count * rows, heads, width, device=device, dtype=torch.bfloat16)
    starts = torch.arange(0, (count + 1) * rows, rows, dtype=torch.int32, device=device)
    contexts = torch.full((count,), context, dtype=torch.int32, device=device)
    tables = torch.randperm(shape[0], device=device).to(torch.int32).view(count, blocks_each)
    plan = attention_plan(count * rows, count, rows, heads, kv_heads, width, device)

    def attend() -> None:
        for keys, values in layers:
            paged_attention(q, keys, values, starts, contexts, tables, plan, width**-0.5)

    graph = Graph(attend, device, GraphPool(device))
    graph.replay()
    seconds = []
    for _ in range(10):
        timer = StreamTimer(device)
        graph.replay()
        seconds.append(timer.seconds() / num_layers)
    return median(seconds), num_bytes / BANDWIDTH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    options = parser.parse_args()
    print("| sequences | rows each | context | us | floor, us | share of the floor |\n|---|---|---|---|---|---|")
    for count, rows, context in CASES:
        seconds, floor = measure(count, rows, context, options.heads, options.kv_heads, options.head_dim)
        figures = f"{1e6 * seconds:.1f} | {1e6 * floor:.1f} | {floor / seconds:.2f}"
        print(f"| {count} | {rows} | {context} | {figures} |", flush=True)


if __name__ == "__main__":
    main()

"""Time of attention on a GPU: of decoding and verification next to the time to read the keys and values once, and of prompts.

    python benchmarks/gpu/attention.py

Sequences of one length; the kernels of several layers run in one CUDA graph, each with its own cold cache. Prompts: one chunk
of a sequence, with the kernel that looks up cache blocks, with the one that gathers keys and values first, and in whole pieces.
"""

import argparse
from statistics import median
from unittest import mock

import torch

from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.formats.layout import PIECE, LongPrompt
from paceline.kernels.gpu.attention import prompts
from paceline.kernels.gpu.attention.paged import paged_attention
from paceline.kernels.gpu.attention.plan import attention_plan
from paceline.kernels.gpu.attention.prompts import attend_long_prompt
from paceline.models.device.cuda_graph import Graph, GraphPool, StreamTimer

BANDWIDTH = 4.3e12
"""Bytes per second of a large copy on an H200."""
COLD_BYTES = 400_000_000
CASES = (
    *((count, 1, 340) for count in (64, 128, 256)),
    *((count, rows, context) for context in (8192, 32768) for count, rows in ((1, 1), (8, 1), (8, 5))),
)
"""Sequences, rows of each, tokens of context."""
PROMPTS = (2048, 0), (2048, 6144), *((rows, n * PIECE) for n in (0, 1, 3) for rows in (7680, PIECE)), (8000, 20000)
"""Rows, tokens of context."""


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


def measure_prompt(rows: int, context: int, heads: int, kv_heads: int, width: int) -> list[float]:
    """Seconds of one layer over a prompt with blocks looked up, with keys and values gathered, and in pieces if it is long."""
    device, blocks = torch.device("cuda"), (context + rows) // BLOCK_SIZE
    keys, values = torch.randn(2, blocks, BLOCK_SIZE, kv_heads, width, device=device, dtype=torch.bfloat16)
    q = torch.randn(rows, heads, width, device=device, dtype=torch.bfloat16)
    starts, contexts = (torch.tensor(ints, dtype=torch.int32, device=device) for ints in ([0, rows], [context]))
    table = torch.randperm(blocks, device=device).to(torch.int32).view(1, blocks)
    plan = attention_plan(rows, 1, rows, heads, kv_heads, width, device)
    out, prompt = torch.empty(rows, heads * width, device=device, dtype=q.dtype), LongPrompt(0, 0, rows, context)

    def paged() -> None:
        paged_attention(q, keys, values, starts, contexts, table, plan, width**-0.5, out=out)

    def in_pieces() -> None:
        attend_long_prompt(q, keys, values, table, prompt, width**-0.5, out)

    def gathered() -> None:
        with mock.patch.object(prompts, "uses_pieces", return_value=False):
            in_pieces()

    seconds = []
    for attend in (paged, gathered, in_pieces)[: 3 if prompts.uses_pieces(rows, context, device) else 2]:
        for _ in range(3):
            attend()
        timer = StreamTimer(device)
        for _ in range(10):
            attend()
        seconds.append(timer.seconds() / 10)
    return seconds


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
    print("\n| rows | context | blocks looked up, ms | gathered, ms | in pieces, ms |\n|---|---|---|---|---|")
    for rows, context in PROMPTS:
        work = 4 * options.heads * options.head_dim * rows * (context + rows / 2)
        found = measure_prompt(rows, context, options.heads, options.kv_heads, options.head_dim)
        cells = " | ".join(f"{1e3 * seconds:.2f} ({work / seconds / 1e12:.0f} TFLOP/s)" for seconds in found)
        print(f"| {rows} | {context} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

"""Random weights and paged caches for the kernel tests."""

import pytest
import torch
from torch import Tensor

from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.cpu import native
from paceline.kernels.formats.layout import AttentionLayout
from paceline.kernels.formats.weights import Activations, Dense, Grouped, Weight

needs_native = pytest.mark.skipif(not native.available(), reason="no native kernels here")

GROUPED = ("q4_32", "q4_32_half", "q4_16", "q4_32_plain", "q8_32", "q8_32_half", "q8_16", "q8_32_offset")
FORMATS = (*GROUPED, "float16", "bfloat16", "float32")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_weight(kind: str, outputs: int, inputs: int, seed: int = 0, activations: Activations = "float32") -> Weight:
    g = generator(seed)
    if not kind.startswith("q"):
        return Dense(torch.randn(outputs, inputs, generator=g).to(getattr(torch, kind)))
    bits, group = kind.split("_")[:2]
    shape = (outputs, inputs // int(group))
    if bits == "q4":
        codes = torch.randint(0, 16, (outputs, inputs), generator=g, dtype=torch.uint8)
    else:
        codes = torch.randint(-128, 128, (outputs, inputs), generator=g, dtype=torch.int8)
    scales, offsets = torch.rand(shape, generator=g) * 0.1, torch.randn(shape, generator=g)
    if kind.endswith("half"):
        scales, offsets = scales.half().float(), offsets.half().float()
    has_offsets = kind in ("q4_32", "q4_32_half", "q4_16", "q8_32_offset")
    return Grouped(codes, scales, offsets if has_offsets else None, int(group), activations)


def make_layout(
    contexts: list[int], rows: list[int], num_blocks: int, ancestors: Tensor | None = None, seed: int = 0
) -> AttentionLayout:
    """Blocks in random order, so that they are not contiguous by chance."""
    order = torch.randperm(num_blocks, generator=generator(seed)).tolist()
    needed = [-(-(c + r) // BLOCK_SIZE) for c, r in zip(contexts, rows, strict=True)]
    tables = torch.zeros(len(rows), max(needed), dtype=torch.int32)
    slots = []
    for s, count in enumerate(needed):
        tables[s, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        for i in range(contexts[s], contexts[s] + rows[s]):
            slots.append(int(tables[s, i // BLOCK_SIZE]) * BLOCK_SIZE + i % BLOCK_SIZE)
    starts = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
    return AttentionLayout(torch.tensor(slots), starts, torch.tensor(contexts, dtype=torch.int32), tables, ancestors)


def make_cache(num_blocks: int, kv_heads: int, width: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    g = generator(seed)
    shape = (num_blocks, BLOCK_SIZE, kv_heads, width)
    return torch.randn(shape, generator=g), torch.randn(shape, generator=g)

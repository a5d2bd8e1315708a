"""Rows of many planes copied in one launch, as KV blocks of all layers."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait

_WORDS = 2048
"""Words of 8 bytes that a program copies."""


def copy_rows(
    sources: Sequence[int],
    targets: Sequence[int],
    read: Sequence[int],
    written: Sequence[int],
    strides: tuple[int, int],
    row_bytes: int,
    device: torch.device,
) -> None:
    """Copy row `read[i]` of every plane to row `written[i]` of its target. `sources` and `targets` are the addresses of the
    planes. `strides` are the bytes from a row to the next in the sources and in the targets."""
    words, (source_stride, target_stride) = row_bytes // 8, strides
    assert not any(size % 8 for size in (row_bytes, *strides))
    values = [*sources, *targets, *read, *written]
    # Pinned: a copy from other memory waits for all work submitted before it
    table = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    _copy_rows[(len(read) * len(sources), triton.cdiv(words, _WORDS))](
        table,
        len(sources),
        len(read),
        source_stride // 8,
        target_stride // 8,
        words,
        WORDS=_WORDS,
        num_warps=8,
        **PDL,
    )


@triton.jit(do_not_specialize=["planes", "count"])  # one kernel for all numbers of blocks and layers
def _copy_rows(table, planes, count, source_stride, target_stride, words, WORDS: tl.constexpr, PDL: tl.constexpr):
    gdc_wait(PDL)
    gdc_launch(PDL)
    plane, row = tl.program_id(0) % planes, tl.program_id(0) // planes
    read = tl.load(table + 2 * planes + row)
    written = tl.load(table + 2 * planes + count + row)
    source = tl.load(table + plane).to(tl.pointer_type(tl.int64)) + read * source_stride
    target = tl.load(table + planes + plane).to(tl.pointer_type(tl.int64)) + written * target_stride
    lane = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    is_kept = lane < words
    tl.store(target + lane, tl.load(source + lane, mask=is_kept), mask=is_kept)

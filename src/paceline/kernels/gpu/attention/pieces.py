"""Attention of long prompts by cuDNN, in pieces of `PIECE` rows and `PIECE` keys.

cuDNN is faster than the kernel of `prompts.py` for so many rows, but it prepares every new shape for 50 to 500 ms. All pieces
have one shape. The result of a piece comes with the logarithms of its sums, with which the results of several are added.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.sequence import LEAST_PIECE_ROWS
from paceline.kernels.formats.layout import PIECE
from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait

_HEADS = 8
"""Heads of one row per program."""


def has_pieces(device: torch.device) -> bool:
    """Whether the device has cuDNN; `meta` counts as one that has."""
    return device.type == "meta" or (device.type == "cuda" and torch.backends.cudnn.is_available())


def uses_pieces(num_rows: int, context: int, device: torch.device) -> bool:
    """Whether a chunk of `num_rows` rows after `context` tokens is computed in pieces."""
    return has_pieces(device) and LEAST_PIECE_ROWS <= num_rows <= PIECE and (context == 0 or context >= PIECE)


def attend_piece(
    q: Tensor,  # [PIECE, H, hd]
    keys: Tensor,  # [PIECE, KV, hd]
    values: Tensor,  # [PIECE, KV, hd]
    scale: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """([PIECE, H, hd], natural logarithms of the sums [H, PIECE]). Causal: row i attends to the keys up to i; else to all."""
    if q.device.type == "meta":
        return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    batch = (part.transpose(0, 1).unsqueeze(0) for part in (q, keys, values))
    out, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*batch, None, True, 0.0, is_causal, scale=scale)
    return out[0].transpose(0, 1), sums.reshape(q.shape[1], q.shape[0])


def add_piece(
    out: Tensor,  # [T, H * hd]
    sums: Tensor,  # [H, PIECE] float32
    part: Tensor,  # [PIECE, H, hd]
    part_sums: Tensor,  # [H, PIECE] float32
    first_row: int,
    num_rows: int,
) -> None:
    """Add the attention to further keys to the rows of `out` from `first_row` on, and to their `sums`."""
    heads, width = part.shape[1:]
    assert part.stride(2) == 1
    _add_piece[(num_rows, triton.cdiv(heads, _HEADS))](
        out,
        sums,
        part,
        part_sums,
        first_row,
        out.stride(0),
        part.stride(0),
        part.stride(1),
        sums.stride(0),
        part_sums.stride(0),
        HEADS=heads,
        WIDTH=width,
        BLOCK=_HEADS,
        num_warps=4,
        **PDL,
    )


@triton.jit(do_not_specialize=["first_row"])
def _add_piece(
    out,
    sums,
    part,
    part_sums,
    first_row,
    out_stride,
    row_stride,
    head_stride,
    sums_stride,
    part_sums_stride,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    gdc_launch(PDL)
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_head = head < HEADS
    ours = tl.load(sums + head * sums_stride + row, mask=is_head, other=0.0)
    theirs = tl.load(part_sums + head * part_sums_stride + row, mask=is_head, other=0.0)
    top = tl.maximum(ours, theirs)
    our_share, their_share = tl.exp(ours - top), tl.exp(theirs - top)
    total = our_share + their_share
    at = out + (first_row + row) * out_stride + head[:, None] * WIDTH + lane[None, :]
    other = part + row * row_stride + head[:, None] * head_stride + lane[None, :]
    mine = tl.load(at, mask=is_head[:, None], other=0.0).to(tl.float32)
    added = tl.load(other, mask=is_head[:, None], other=0.0).to(tl.float32)
    joined = (mine * our_share[:, None] + added * their_share[:, None]) / total[:, None]
    tl.store(at, joined.to(out.dtype.element_ty), mask=is_head[:, None])
    tl.store(sums + head * sums_stride + row, top + tl.log(total), mask=is_head)

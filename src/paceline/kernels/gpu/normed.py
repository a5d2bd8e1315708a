"""Hidden states before the last factor of the RMS norm, which is one number per row.

norm(h) = r (h * w), r = rsqrt(mean(h^2) + eps). The kernel that writes the residual stream h also writes x = h * w, rounded,
and the squares of h. A matrix product reads x. The operation after the product multiplies its rounded result by r:
norm(h) W^T = r (x W^T). The norm needs no kernel of its own, and the product may come from any library.

Squares are summed as whole numbers of 2^-24, so that the sum is exact: it does not depend on how many programs or threads share
a row.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.gpu.launch import hashed

UNIT = tl.constexpr(16777216.0)
"""Units of one in sums of squares."""
_MOST = tl.constexpr(72057594037927936.0)
"""2^56, the largest square in units. The sum of 128 of them is the largest of int64."""


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """Hidden states of the next product, and what its results are multiplied by."""

    scaled: Tensor  # [T, D], h * w
    squares: Tensor  # [T, P] int64, sums of h^2 over P strips, in units of 2^-24
    eps: float


def norm_arguments(norm: Normed | None) -> tuple[int, Tensor | None, int, float]:
    """(width, squares, parts, eps) for a kernel that applies the factor, zeros for one that does not."""
    return (0, None, 0, 0.0) if norm is None else (norm.scaled.shape[1], norm.squares, norm.squares.shape[1], norm.eps)


@hashed
@triton.jit
def square_units(wide):
    """The squares of float32 values as whole units. A value that is not finite counts as the largest; x has it too."""
    return tl.minimum(wide * wide * UNIT, _MOST).to(tl.int64)


@hashed
@triton.jit
def norm_factor(squares_ptr, rows, is_row, width: tl.constexpr, eps, parts, PARTS: tl.constexpr):
    """[T] float32: r of each row, from its `parts` sums; PARTS is the power of two from `parts` on."""
    strips = tl.arange(0, PARTS)
    inside = is_row[:, None] & (strips < parts)[None, :]
    squares = tl.load(squares_ptr + rows[:, None] * parts + strips[None, :], mask=inside, other=0)
    return _factor(tl.sum(squares, 1), width, eps)


@hashed
@triton.jit
def row_factor(squares_ptr, row, width: tl.constexpr, eps, parts, PARTS: tl.constexpr):
    """r of one row."""
    strips = tl.arange(0, PARTS)
    squares = tl.load(squares_ptr + row * parts + strips, mask=strips < parts, other=0)
    return _factor(tl.sum(squares, 0), width, eps)


@hashed
@triton.jit
def _factor(squares, width: tl.constexpr, eps):
    return tl.rsqrt(tl.fma(squares.to(tl.float32), 1.0 / (width * UNIT), eps))

"""Products with 4-bit weights (`kernels/formats/four_bit.py`), one group of inputs after another.

The codes of a group are whole numbers (code - zero), or the values of MXFP4. They are exact in bfloat16: the tensor cores
multiply them with activations, and the scale is applied to the float32 sum of the group. No weight is rounded.
"""

import triton
import triton.language as tl

from paceline.kernels.formats.four_bit import KINDS
from paceline.kernels.gpu.launch import IS_INTERPRETED, hashed, prefetch

_ASM = tl.constexpr(not IS_INTERPRETED)
_FLOAT16 = tl.constexpr(KINDS.index("float16"))
_MXFP4 = tl.constexpr(KINDS.index("mxfp4"))

# Four bytes to four registers of two bf16 each: the low halves, then the high halves. The compiler may give a thread bytes that
# are not neighbours in memory: element i of the input has to be element i of each output. 0x4300 with a code as its lowest bits
# is 128 + code; $5 and $6 hold 128 + zero.
_INTEGERS = tl.constexpr("""
{
.reg .b32 a, b, c, d;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 d, d, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 $0, a, $5;
sub.rn.bf16x2 $1, b, $6;
sub.rn.bf16x2 $2, c, $5;
sub.rn.bf16x2 $3, d, $6;
}
""")
# Moving sign, exponent and fraction into place gives the value times 2^-126, subnormals included. $5 to $8 hold 2^126 times the
# scale of the group; the products are exact.
_FLOATS = tl.constexpr("""
{
.reg .b32 a, b, c, d, p, q, s, t, u, v;
prmt.b32 p, $4, 0, 0x4140;
prmt.b32 q, $4, 0, 0x4342;
shl.b32 a, p, 6;
shl.b32 b, q, 6;
shl.b32 c, p, 2;
shl.b32 d, q, 2;
shl.b32 s, p, 12;
shl.b32 t, q, 12;
shl.b32 u, p, 8;
shl.b32 v, q, 8;
and.b32 a, a, 0x01C001C0;
and.b32 b, b, 0x01C001C0;
and.b32 c, c, 0x01C001C0;
and.b32 d, d, 0x01C001C0;
lop3.b32 a, a, s, 0x80008000, 0xF8;
lop3.b32 b, b, t, 0x80008000, 0xF8;
lop3.b32 c, c, u, 0x80008000, 0xF8;
lop3.b32 d, d, v, 0x80008000, 0xF8;
mul.rn.bf16x2 $0, a, $5;
mul.rn.bf16x2 $1, b, $6;
mul.rn.bf16x2 $2, c, $7;
mul.rn.bf16x2 $3, d, $8;
}
""")


@hashed
@triton.jit
def add_four_bit(
    acc,  # [N, T] float32
    w_ptr,
    word_ptr,
    outs,  # [N] rows of the matrix
    is_out,
    x_ptr,
    x_offsets,  # [T] first element of each row of x
    is_row,
    first,  # first input, a multiple of 128
    groups,
    padded_n,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """acc + W x^T over BLOCK_K inputs, padding included. EVEN: all outputs exist."""
    HALF: tl.constexpr = GROUP // 2
    COUNT: tl.constexpr = acc.shape[0]
    kind: tl.constexpr = x_ptr.dtype.element_ty
    is_asm: tl.constexpr = _ASM and kind == tl.bfloat16
    j = tl.arange(0, HALF)
    rows = (outs // 16).to(tl.int64) * groups * (16 * HALF) + outs % 16 * HALF
    w_ptrs = w_ptr + rows[:, None] + j[None, :]
    x_ptrs = x_ptr + x_offsets[None, :] + j[:, None]
    for i in tl.static_range(BLOCK_K // GROUP):
        group = first // GROUP + i
        begin = first + i * GROUP
        row = group // 2 if KIND == _MXFP4 else group
        if EVEN:
            w = tl.load(w_ptrs + group * (16 * HALF), eviction_policy="evict_first")
            words = tl.load(word_ptr + row * padded_n + outs)
        else:
            w = tl.load(w_ptrs + group * (16 * HALF), mask=is_out[:, None], other=0, eviction_policy="evict_first")
            words = tl.load(word_ptr + row * padded_n + outs, mask=is_out, other=0)
        if K % 128 == 0:
            low_x = tl.load(x_ptrs + begin, mask=is_row[None, :], other=0.0)
            high_x = tl.load(x_ptrs + begin + HALF, mask=is_row[None, :], other=0.0)
        else:
            low_x = tl.load(x_ptrs + begin, mask=is_row[None, :] & (begin + j < K)[:, None], other=0.0)
            high_x = tl.load(x_ptrs + begin + HALF, mask=is_row[None, :] & (begin + HALF + j < K)[:, None], other=0.0)
        if KIND == _MXFP4:
            low, high = _floats(w, words >> (i % 2 * 16), kind, is_asm)
            acc = tl.dot(low, low_x, acc, input_precision=PRECISION)
            acc = tl.dot(high, high_x, acc, input_precision=PRECISION)
        else:
            if KIND == _FLOAT16:
                scale = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            else:
                scale = (words << 16).to(tl.float32, bitcast=True)
            zero = (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)  # 128 + zero
            low, high = _integers(w, tl.broadcast_to(zero[:, None], [COUNT, HALF]), kind, is_asm)
            part = tl.dot(low, low_x, input_precision=PRECISION)
            part = tl.dot(high, high_x, part, input_precision=PRECISION)
            acc += part * scale[:, None]
    return acc


@triton.jit
def _integers(w, zero, kind: tl.constexpr, is_asm: tl.constexpr):
    """(low, high): code - zero of both halves of each byte."""
    if is_asm:
        low, high = tl.inline_asm_elementwise(
            _INTEGERS, "=r,=r,=r,=r,r,r,r", [w, zero], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        whole = zero.to(tl.float32) - 128.0
        low = ((w & 15).to(tl.float32) - whole).to(kind)
        high = ((w >> 4).to(tl.float32) - whole).to(kind)
    return low, high


@triton.jit
def _floats(w, words, kind: tl.constexpr, is_asm: tl.constexpr):
    """(low, high): the scaled values of MXFP4 in both halves of each byte. Each half is a group of 32 inputs, with its scale in
    the lowest byte of `words`, or in the next."""
    if is_asm:
        low_scale = ((words & 255) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        high_scale = ((words & 0xFF00) >> 1).to(tl.int16).to(tl.bfloat16, bitcast=True)
        low, high = tl.inline_asm_elementwise(
            _FLOATS,
            "=r,=r,=r,=r,r,r,r,r,r",
            [w, tl.broadcast_to(low_scale[:, None], w.shape), tl.broadcast_to(high_scale[:, None], w.shape)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low = (_value(w & 15) * _scale(words & 255)).to(kind)
        high = (_value(w >> 4) * _scale((words >> 8) & 255)).to(kind)
    return low, high


@triton.jit
def _scale(exponent):
    """[N, 1] float32; the exponent is that of 2^126 times the scale."""
    return ((exponent << 23).to(tl.float32, bitcast=True) * 1.1754943508222875e-38)[:, None]


@triton.jit
def _value(code):
    size = (code & 7).to(tl.float32)
    size = tl.where(size < 4.0, size * 0.5, tl.where(size < 6.0, size - 2.0, 2.0 * size - 8.0))
    return tl.where(code > 7, -size, size)


@triton.jit
def fetch_four_bit(
    w_ptr, first_out, n, first, groups, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr
):
    """Prefetch the first INPUTS of a strip of OUTPUTS into L2, in lines of 128 bytes."""
    tile, line = tl.arange(0, OUTPUTS // 16), tl.arange(0, INPUTS // 16)
    at = (first_out // 16 + tile).to(tl.int64) * groups * (8 * GROUP) + first * 8
    inside = (first_out + tile * 16 < n)[:, None] & (first + line * 16 < groups * GROUP)[None, :]
    prefetch(tl.where(inside, w_ptr + at[:, None] + line[None, :] * 128, w_ptr))

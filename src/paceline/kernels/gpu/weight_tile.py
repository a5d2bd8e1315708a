"""Loads a tile of weights for the tensor cores: 8-bit values are converted to bf16 in registers, exactly."""

import triton
import triton.language as tl

from paceline.kernels.gpu.launch import IS_INTERPRETED, hashed, prefetch

_ASM = tl.constexpr(not IS_INTERPRETED)

# Four bytes to two registers of two bf16 each. e4m3: moving sign, exponent and fraction into place gives the value times
# 2^-120, subnormals included; an exact product with 2^120 (0x7B80) restores it.
_FROM_E4M3 = tl.constexpr("""
{
.reg .b32 a, b, s, t, two120;
mov.b32 two120, 0x7B807B80;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 s, a, 4;
shr.u32 t, b, 4;
and.b32 s, s, 0x07F007F0;
and.b32 t, t, 0x07F007F0;
and.b32 a, a, 0x80008000;
and.b32 b, b, 0x80008000;
or.b32 a, a, s;
or.b32 b, b, t;
mul.rn.bf16x2 $0, a, two120;
mul.rn.bf16x2 $1, b, two120;
}
""")
# int8: 0x4300 with the low seven bits as fraction is 128 + low; subtract 128, or 256 if the sign bit is set.
_FROM_INT8 = tl.constexpr("""
{
.reg .b32 a, b, c, d;
prmt.b32 a, $2, 0, 0x4140;
prmt.b32 b, $2, 0, 0x4342;
and.b32 c, a, 0x00800080;
and.b32 d, b, 0x00800080;
and.b32 a, a, 0x007F007F;
and.b32 b, b, 0x007F007F;
or.b32 c, c, 0x43004300;
or.b32 d, d, 0x43004300;
or.b32 a, a, 0x43004300;
or.b32 b, b, 0x43004300;
sub.rn.bf16x2 $0, a, c;
sub.rn.bf16x2 $1, b, d;
}
""")


@hashed
@triton.jit
def load_weights(w_ptrs, mask, EVEN: tl.constexpr, kind: tl.constexpr):
    """Weights converted to `kind`. Each is read once, so it is evicted from the cache first."""
    if EVEN:
        w = tl.load(w_ptrs, eviction_policy="evict_first")
    else:
        w = tl.load(w_ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
    if _ASM and kind == tl.bfloat16 and w.dtype == tl.float8e4nv:
        return tl.inline_asm_elementwise(_FROM_E4M3, "=r,=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4)
    if _ASM and kind == tl.bfloat16 and w.dtype == tl.int8:
        return tl.inline_asm_elementwise(_FROM_INT8, "=r,=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4)
    return w.to(kind)


@triton.jit
def fetch_ahead(w_ptrs, inside, k, columns: tl.constexpr):
    """Prefetch the first `columns` of a strip into L2, in lines of 128 bytes."""
    line: tl.constexpr = 1024 // w_ptrs.dtype.element_ty.primitive_bitwidth
    lines = tl.arange(0, columns // line) * line
    prefetch(tl.where(inside[:, None] & (lines < k)[None, :], w_ptrs + lines[None, :], w_ptrs))

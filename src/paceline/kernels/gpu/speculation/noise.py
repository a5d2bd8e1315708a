"""The counter-based Gumbel noise of `speculation/rows/noise.py`, for use inside kernels.

Integers are equal to the bit; tests compare the two implementations. Logarithms are polynomials within two units in the last
place: the hardware logarithm that Triton uses has a far larger error where noise is large.
"""

import triton
import triton.language as tl


@triton.jit
def gumbel(bits):
    """G = -log(-log1p(-u)), u = (bits + 1/2) / 2^32, float32 from uint32."""
    # above -1, as in the reference: float32 would round the last 128 of 2^32 values to 1 and G to -inf
    minus_u = tl.maximum(bits.to(tl.float32) * -(2.0**-32) - 2.0**-33, 2.0**-24 - 1.0)
    # 1 - u = 2^e (1 + f): f is rounded once, because 2^-e and 2^-e - 1 are exact for e >= -24
    exponent = _exponent(minus_u + 1.0)
    shrink = ((127 << 23) - exponent).to(tl.float32, bitcast=True)  # 2^-e
    inner = -_log(exponent, minus_u * shrink + (shrink - 1.0))
    exponent = _exponent(inner)
    mantissa = (inner.to(tl.int32, bitcast=True) - exponent).to(tl.float32, bitcast=True)
    return -_log(exponent, mantissa - 1.0)


@triton.jit
def noise_bits(stream, position, tokens):
    """uint32 per token of [M] int32 ids, from the uint64 stream (purpose, seed and choice) and the position."""
    low = _splitmix(stream ^ position)
    high = _splitmix(low)
    a = (low & 0xFFFFFFFF).to(tl.uint32)
    b = (low >> 32).to(tl.uint32) | 1
    c = (high & 0xFFFFFFFF).to(tl.uint32)
    return _avalanche((_avalanche(tokens.to(tl.uint32)) ^ a) * b) ^ c


@triton.jit
def _splitmix(x):
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _avalanche(x):
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def _exponent(x):
    """e << 23 of x = 2^e m, m in [2/3, 4/3), x positive and normal."""
    return (x.to(tl.int32, bitcast=True) - 0x3F2AAAAB) & -0x800000


@triton.jit
def _log(exponent, f):
    """log(2^e (1 + f)) = e log 2 + f - f^2 / 2 + f^3 P(f), |f| <= 1/3; P interpolates at Chebyshev points."""
    p = f * 0.11330617219209671 - 0.12422200292348862
    p = p * f + 0.1091565489768982
    p = p * f - 0.12288721650838852
    p = p * f + 0.1429186761379242
    p = p * f - 0.16673316061496735
    p = p * f + 0.19999948143959045
    p = p * f - 0.24999944865703583
    p = p * f + 0.3333333432674408
    return exponent.to(tl.float32) * (0.6931471805599453 * 2.0**-23) + (f + f * f * (p * f - 0.5))

"""Noise in kernels against `speculation/rows/noise.py`."""

import torch
import triton
import triton.language as tl

from paceline.kernels.gpu.speculation.noise import gumbel, noise_bits
from paceline.speculation.rows import noise
from paceline.speculation.rows.noise import NoiseKey, Purpose
from tests.kernels.gpu.cases import DEVICE, stream_of

KEYS = [NoiseKey(0, 0, 0), NoiseKey(7, 3, 41), NoiseKey(2**63 + 5, 1, 2**31 + 9), NoiseKey(2**64 - 1, 0, 131_071)]
VOCABULARY = 4096


@triton.jit
def _bits(streams, positions, out, V: tl.constexpr):
    row = tl.program_id(0)
    stream = tl.load(streams + row).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row).to(tl.uint64, bitcast=True)
    token = tl.arange(0, V)
    tl.store(out + row * V + token, noise_bits(stream, position, token).to(tl.int32, bitcast=True))


@triton.jit
def _gumbel(bits, out, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, gumbel(tl.load(bits + at).to(tl.uint32, bitcast=True)))


def test_integers_are_equal() -> None:
    for purpose in Purpose:
        streams = torch.tensor([stream_of(key, purpose) for key in KEYS], device=DEVICE)
        positions = torch.tensor([key.position for key in KEYS], device=DEVICE)
        out = torch.zeros(len(KEYS), VOCABULARY, dtype=torch.int32, device=DEVICE)
        _bits[(len(KEYS),)](streams, positions, out, V=VOCABULARY)
        cpu = torch.device("cpu")
        expected = noise._mix(noise._vocabulary(VOCABULARY, cpu), noise._words(KEYS, purpose, cpu))
        assert torch.equal(out.cpu(), expected)


def test_logarithms_are_accurate_to_the_last_bits() -> None:
    """At every magnitude: evenly spaced integers, and those near both ends, where G is largest and smallest."""
    ends = torch.cat(
        [torch.arange(1024), 2**32 - 1 - torch.arange(1024), 2 ** torch.arange(32), torch.tensor([2**31 - 1])]
    )
    bits = torch.cat((ends, torch.arange(0, 2**32, 2**32 // 60_000)))
    bits = bits[: len(bits) // 1024 * 1024].to(torch.uint32).view(torch.int32).to(DEVICE)
    out = torch.full((len(bits),), torch.nan, device=DEVICE)
    _gumbel[(len(bits) // 1024,)](bits, out, N=1024)
    unsigned = bits.cpu().view(torch.uint32).to(torch.float32)
    u = (unsigned * 2.0**-32 + 2.0**-33).clamp(max=1 - 2.0**-24).double()  # one rounding, before any logarithm
    exact = -(-(-u).log1p()).log()
    # A relative error of the inner logarithm is an absolute error of G
    torch.testing.assert_close(out.cpu().double(), exact, rtol=2.0**-23, atol=2.0**-22)
    reference = noise._gumbel(bits.cpu())
    torch.testing.assert_close(out.cpu(), reference, rtol=2.0**-22, atol=2.0**-22)

"""The noise is keyed, uniform, independent across every part of its key, and the same wherever it is evaluated."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.speculation.rows import noise
from paceline.speculation.rows.noise import NoiseKey, Purpose, gumbel, gumbel_at, uniform

CPU = torch.device("cpu")


def keys(count: int, seed: int = 1, choice: int = 0, start: int = 0) -> list[NoiseKey]:
    return [NoiseKey(seed, choice, start + i) for i in range(count)]


def as_uniform(values: torch.Tensor) -> np.ndarray:
    """Gumbel noise back to the unit interval."""
    return np.exp(-np.exp(-values.double().numpy()))


def reference_bits(key: NoiseKey, purpose: Purpose, token: int) -> int:
    """The integer stage in plain Python integers, as an unsigned number."""

    def splitmix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    def avalanche(x: int) -> int:
        x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
        x = (x ^ x >> 15) * 0xD35A2D97 % 2**32
        return x ^ x >> 15

    state = 0
    for part in (int(purpose), *key):
        state = splitmix(state ^ part)
    a, b, c = state % 2**32, state >> 32, splitmix(state) % 2**32
    return avalanche((avalanche(token) ^ a) * (b | 1) % 2**32) ^ c


def test_integer_stage_is_exact() -> None:
    """A seed gives the same text in every release, on every device: these bits never change."""
    some = [NoiseKey(2**63 - 1, 3, 7), NoiseKey(0, 0, 0), NoiseKey(12345678901234567, 127, 131071)]
    for purpose in Purpose:
        bits = noise._mix(noise._vocabulary(50, CPU), noise._words(some, purpose, CPU))
        expected = [[reference_bits(key, purpose, token) for token in range(50)] for key in some]
        assert (bits.long() & 0xFFFFFFFF).tolist() == expected


def test_chosen_tokens_get_the_noise_of_the_whole_vocabulary() -> None:
    whole = gumbel(keys(7), Purpose.SHARED, 1003, CPU)
    tokens = torch.randint(0, 1003, (7, 37), generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel_at(keys(7), Purpose.SHARED, tokens), whole.gather(1, tokens))


def test_a_row_does_not_depend_on_its_batch() -> None:
    whole = gumbel(keys(9), Purpose.RECOVER, 1003, CPU)
    for i, key in enumerate(keys(9)):
        assert torch.equal(gumbel([key], Purpose.RECOVER, 1003, CPU)[0], whole[i])


def test_gumbel_is_finite_and_precise_at_both_ends() -> None:
    bits = torch.tensor([0, 1, 2, 2**31 - 1, -(2**31), -2, -1], dtype=torch.int32)
    values = noise._gumbel(bits)
    u = [((b % 2**32) + 0.5) / 2**32 for b in bits.tolist()]
    assert torch.isfinite(values).all()
    assert values[:5].tolist() == pytest.approx([-math.log(-math.log1p(-x)) for x in u[:5]], rel=1e-6)
    assert values[0] == values.max() > 22.8
    assert values[-1] == values.min() < -2.8


def test_uniform_lies_strictly_inside_the_unit_interval_and_is_flat() -> None:
    values = uniform(keys(20_000), Purpose.ACCEPT, [5] * 20_000)
    assert values.dtype == torch.float64
    assert 0.0 < values.min() < values.max() < 1.0
    assert stats.kstest(values.numpy(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("purpose", Purpose)
def test_noise_is_flat_along_tokens_positions_seeds_and_choices(purpose: Purpose) -> None:
    batches = {
        "tokens": gumbel(keys(1), purpose, 49152, CPU),
        "positions": gumbel(keys(6000), purpose, 4, CPU),
        "seeds": gumbel([NoiseKey(seed, 0, 9) for seed in range(6000)], purpose, 4, CPU),
        "choices": gumbel([NoiseKey(3, choice, 9) for choice in range(6000)], purpose, 4, CPU),
    }
    for name, values in batches.items():
        assert stats.kstest(as_uniform(values).ravel(), "uniform").pvalue > 1e-4, name


def test_streams_are_independent() -> None:
    """Neighbours in every part of the key: no correlation, in value or in the tail where picks are decided."""
    size = 49152
    base = gumbel([NoiseKey(4, 0, 100)], Purpose.SHARED, size, CPU)[0]
    others = {
        "next position": gumbel([NoiseKey(4, 0, 101)], Purpose.SHARED, size, CPU)[0],
        "next seed": gumbel([NoiseKey(5, 0, 100)], Purpose.SHARED, size, CPU)[0],
        "next choice": gumbel([NoiseKey(4, 1, 100)], Purpose.SHARED, size, CPU)[0],
        "seed and choice swapped": gumbel([NoiseKey(0, 4, 100)], Purpose.SHARED, size, CPU)[0],
        "next token": base.roll(1),
        **{p.name: gumbel([NoiseKey(4, 0, 100)], p, size, CPU)[0] for p in Purpose if p is not Purpose.SHARED},
    }
    x = as_uniform(base)
    for name, other in others.items():
        y = as_uniform(other)
        assert abs(np.corrcoef(x, y)[0, 1]) < 5 / math.sqrt(size), name
        table, *_ = np.histogram2d(x, y, bins=16, range=[[0, 1], [0, 1]])
        assert stats.chisquare(table.ravel()).pvalue > 1e-4, name
        tail = ((x > 0.99) & (y > 0.99)).sum()
        assert stats.binomtest(int(tail), size, 1e-4).pvalue > 1e-4, name


def test_every_bit_is_fair() -> None:
    bits = noise._mix(noise._vocabulary(4096, CPU), noise._words(keys(16), Purpose.SHARED, CPU)).flatten()
    ones = torch.stack([(bits >> b & 1).sum() for b in range(32)])
    assert ((ones - len(bits) / 2).abs() < 4.5 * math.sqrt(len(bits)) / 2).all()


def test_gumbel_max_reproduces_a_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    count = 60_000
    picks = (logits + gumbel(keys(count), Purpose.SHARED, 6, CPU)).argmax(1)
    observed = torch.bincount(picks, minlength=6).numpy()
    assert stats.chisquare(observed, logits.double().softmax(0).numpy() * count).pvalue > 1e-3


def test_two_steps_of_gumbel_max_are_independent() -> None:
    logits = torch.tensor([1.0, 0.0, -0.5])
    picks = (logits + gumbel(keys(60_000), Purpose.SHARED, 3, CPU)).argmax(1)
    pairs = torch.bincount(picks[0::2] * 3 + picks[1::2], minlength=9).numpy()
    p = logits.double().softmax(0).numpy()
    assert stats.chisquare(pairs, np.outer(p, p).ravel() * 30_000).pvalue > 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_the_host() -> None:
    cuda = torch.device("cuda")
    for purpose in Purpose:
        host = noise._mix(noise._vocabulary(5000, CPU), noise._words(keys(5), purpose, CPU))
        device = noise._mix(noise._vocabulary(5000, cuda), noise._words(keys(5), purpose, cuda))
        assert torch.equal(host, device.cpu())
        assert torch.allclose(noise._gumbel(host), noise._gumbel(device).cpu(), rtol=1e-5, atol=1e-6)

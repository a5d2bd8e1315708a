import pytest
import torch

from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.rotary import apply_rotary_and_store, apply_rotary_and_store_reference
from tests.kernels.cases import generator, needs_native

HEADS, KV_HEADS = 6, 2


@needs_native
@pytest.mark.parametrize("rows", [1, 9, 33])
@pytest.mark.parametrize("width", [64, 128, 6])
def test_native_equals_the_reference(rows: int, width: int) -> None:
    qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * width, generator=generator(0))
    angles = torch.rand(rows, width // 2, generator=generator(1)) * 6.28
    slots = torch.randperm(4 * BLOCK_SIZE, generator=generator(2))[:rows]
    caches = [torch.zeros(2, 4, BLOCK_SIZE, KV_HEADS, width) for _ in range(2)]
    outs = [
        apply(qkv, angles.cos(), angles.sin(), cache[0], cache[1], slots, HEADS, KV_HEADS)
        for apply, cache in zip((apply_rotary_and_store, apply_rotary_and_store_reference), caches, strict=True)
    ]
    assert outs[0].shape == (rows, HEADS, width)
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(caches[0], caches[1], rtol=1e-6, atol=1e-6)


def test_dimensions_are_rotated_in_pairs_of_halves() -> None:
    qkv = torch.tensor([[1.0, 2.0, 3.0, 4.0] * 3])
    quarter = (torch.zeros(1, 2), torch.ones(1, 2))  # cos, sin of 90 degrees
    keys, values = torch.zeros(2, 1, BLOCK_SIZE, 1, 4)
    q = apply_rotary_and_store_reference(qkv, *quarter, keys, values, torch.tensor([5]), 1, 1)
    assert q.flatten().tolist() == [-3.0, -4.0, 1.0, 2.0]
    assert keys[0, 5, 0].tolist() == [-3.0, -4.0, 1.0, 2.0]
    assert values[0, 5, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert keys.count_nonzero() == values.count_nonzero() == 4

"""4-bit weights of drafts."""

import torch

from paceline.models.heads.vocabulary import four_bits


def test_a_value_moves_by_at_most_half_a_step() -> None:
    values = torch.randn(8, 96, generator=torch.Generator().manual_seed(0))
    weight = four_bits(values)
    step = weight.scales.repeat_interleave(32, 1)
    assert weight.offsets is not None
    assert torch.equal(weight.offsets, weight.offsets.half().float())  # float16 is exact: fewer bytes
    assert bool(((weight.dequantize() - values).abs() <= 0.51 * step + 2e-3).all())


def test_equal_values_stay_finite() -> None:
    assert torch.equal(four_bits(torch.full((2, 32), 0.5)).dequantize(), torch.full((2, 32), 0.5))
    assert not four_bits(torch.zeros(2, 32)).dequantize().any()

import pytest
import torch

from paceline.kernels.gpu.speculation.join_norms import join_norms
from paceline.kernels.rms_norm import rms_norm_reference
from tests.kernels.cases import generator
from tests.kernels.gpu.cases import on_device


@pytest.mark.parametrize(("rows", "keep_normed"), [(None, False), ([2, 0, 2], True)])
def test_both_halves_equal_the_reference(rows, keep_normed):
    g = generator(3)
    table, states = torch.randn(9, 20, generator=g), torch.randn(3, 20, generator=g)
    norms = [1 + 0.1 * torch.randn(20, generator=g) for _ in range(2)]
    tokens = torch.tensor([4, 8, 0])
    chosen = states if rows is None else states[rows]
    halves = [rms_norm_reference(x, norm, 1e-5) for x, norm in zip((table[tokens], chosen), norms, strict=True)]
    given = on_device(tokens, table, norms[0], states, norms[1])
    index = None if rows is None else on_device(torch.tensor(rows))[0]
    joined, residual = join_norms(*given, 1e-5, index, keep_normed)
    torch.testing.assert_close(joined.cpu(), torch.cat(halves, 1))
    torch.testing.assert_close(residual.cpu(), halves[1] if keep_normed else chosen)

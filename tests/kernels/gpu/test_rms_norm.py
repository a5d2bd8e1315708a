import pytest
import torch

from paceline.kernels.gpu.rms_norm import add_rms_norm, rms_norm
from paceline.kernels.rms_norm import rms_norm_reference
from tests.kernels.cases import generator
from tests.kernels.gpu.cases import on_device

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (3, 64), (5, 4096)])
def test_norm_alone_and_after_the_addition(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(rows, width, generator=generator(seed)).to(dtype) for seed in (0, 1))
    weight = torch.rand(width, generator=generator(2)).to(dtype)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    expected = rms_norm_reference(x, weight, 1e-5)
    mine, other, scale = on_device(x, residual, weight)
    torch.testing.assert_close(rms_norm(mine, scale, 1e-5).cpu(), expected, **close)

    total = x + residual
    expected = rms_norm_reference(total, weight, 1e-5)
    normed, summed = add_rms_norm(mine, other, scale, 1e-5)
    torch.testing.assert_close(summed.cpu(), total, **close)
    torch.testing.assert_close(normed.cpu(), expected, **close)
    assert torch.equal(mine.cpu(), x)

    out = torch.full_like(mine, torch.nan)
    assert add_rms_norm(mine, other, scale, 1e-5, out=out, total=other)[1] is other
    assert torch.equal(out, normed)
    assert torch.equal(other, summed)


def test_a_row_of_zeros_stays_zero() -> None:
    x, weight = on_device(torch.zeros(2, 100), torch.ones(100))
    assert rms_norm(x, weight, 1e-6, out=x) is x
    assert not x.any()

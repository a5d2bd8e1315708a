import pytest
import torch

from paceline.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from tests.kernels.cases import generator, needs_native


@needs_native
@pytest.mark.parametrize("width", [64, 576, 100, 7])
@pytest.mark.parametrize("rows", [1, 9, 33])
def test_native_equals_the_reference(rows: int, width: int) -> None:
    x, residual = torch.randn(2, rows, width, generator=generator(0))
    weight = torch.randn(width, generator=generator(1))
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5), rtol=1e-5, atol=1e-6)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, rms_norm_reference(total, weight, 1e-5), rtol=1e-5, atol=1e-6)


@needs_native
def test_the_bits_of_a_row_do_not_depend_on_other_rows() -> None:
    x, residual = torch.randn(2, 40, 100, generator=generator(2))
    weight = torch.rand(100, generator=generator(3))
    together = add_rms_norm(x, residual, weight, 1e-5)[0]
    for i in range(40):
        assert torch.equal(add_rms_norm(x[i : i + 1], residual[i : i + 1], weight, 1e-5)[0][0], together[i])
        assert torch.equal(rms_norm(x[i : i + 1] + residual[i : i + 1], weight, 1e-5)[0], together[i])


def test_other_dtypes_and_gradients_use_the_reference() -> None:
    x = torch.randn(2, 64, generator=generator(4))
    assert rms_norm(x.bfloat16(), torch.ones(64, dtype=torch.bfloat16), 1e-5).dtype == torch.bfloat16
    x.requires_grad_()
    rms_norm(x, torch.ones(64), 1e-5).sum().backward()
    assert x.grad is not None

import pytest
import torch

from paceline.kernels.activation import gated_reference
from paceline.kernels.gpu.gated import gated
from paceline.kernels.gpu.normed import Normed
from tests.kernels.cases import generator
from tests.kernels.gpu.cases import on_device


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)]
)
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (3, 40), (2, 1024)])
def test_equals_the_reference(rows: int, width: int, dtype: torch.dtype, tolerance: float) -> None:
    gate_up = (torch.randn(rows, 2 * width, generator=generator(0)) * 4).to(dtype)
    gate_up[0, 0], gate_up[0, 1] = 80.0, -80.0
    expected = gated_reference(gate_up)
    given = on_device(gate_up)[0]
    torch.testing.assert_close(gated(given, "silu").cpu(), expected, rtol=tolerance, atol=tolerance)


def test_the_factor_of_the_norm_is_applied_first() -> None:
    gate_up = torch.randn(3, 80, generator=generator(0))
    hidden = torch.randn(3, 16, generator=generator(1))
    squares = (hidden.square() * 2**24).long()
    factor = torch.rsqrt(hidden.square().mean(1, keepdim=True) + 1e-5)
    given, x, sums = on_device(gate_up, hidden, squares)
    ours = gated(given, "silu", Normed(x, sums, 1e-5))
    torch.testing.assert_close(ours.cpu(), gated_reference(gate_up * factor), rtol=1e-5, atol=1e-5)

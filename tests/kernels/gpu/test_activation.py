import pytest
import torch

from paceline.kernels.activation import gated_reference
from paceline.kernels.gpu.activation import silu_mul
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
    torch.testing.assert_close(silu_mul(given).cpu(), expected, rtol=tolerance, atol=tolerance)
    out = torch.full((rows, width), torch.nan, dtype=dtype, device=given.device)
    assert silu_mul(given, out) is out
    torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance)

import pytest
import torch

from paceline.kernels.activation import silu_mul, silu_mul_reference
from tests.kernels.cases import generator, needs_native


@needs_native
@pytest.mark.parametrize("width", [1536, 64, 37, 3])
def test_native_equals_the_reference(width: int) -> None:
    gate_up = torch.randn(9, 2 * width, generator=generator(0)) * 20
    expected = silu_mul_reference(gate_up.double())
    torch.testing.assert_close(silu_mul(gate_up).double(), expected, rtol=2e-6, atol=1e-30)


@needs_native
def test_extreme_inputs() -> None:
    gate = torch.tensor([0.0, -0.0, 1e-30, 88.0, 200.0, 1e30, -80.0, -200.0, float("inf"), float("nan")])
    out = silu_mul(torch.cat((gate, torch.ones_like(gate))).unsqueeze(0))[0]
    torch.testing.assert_close(out[:9], torch.nn.functional.silu(gate[:9]), rtol=2e-6, atol=1e-35)
    assert out[9].isnan()


@needs_native
def test_the_bits_of_a_row_do_not_depend_on_other_rows() -> None:
    gate_up = torch.randn(33, 74, generator=generator(1))
    together = silu_mul(gate_up)
    for i in range(33):
        assert torch.equal(silu_mul(gate_up[i : i + 1])[0], together[i])

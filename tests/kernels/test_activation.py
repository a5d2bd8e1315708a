import pytest
import torch

from paceline.kernels.activation import gated, gated_reference
from paceline.kernels.formats.activation import NUMBERS, Activation
from tests.kernels.cases import generator, needs_native

KINDS: tuple[Activation, ...] = tuple(NUMBERS)


@needs_native
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1536, 64, 37, 3])
def test_native_equals_the_reference(width: int, kind: Activation) -> None:
    gate_up = torch.randn(9, 2 * width, generator=generator(0)) * (20 if kind == "silu" else 5)
    expected = gated_reference(gate_up.double(), kind)
    atol = 1e-30 if kind == "silu" else 1e-6  # the tanh approximation rounds 1 + tanh(u) for a large negative u
    torch.testing.assert_close(gated(gate_up, kind).double(), expected, rtol=2e-6, atol=atol)


@needs_native
def test_extreme_inputs() -> None:
    gate = torch.tensor([0.0, -0.0, 1e-30, 88.0, 200.0, 1e30, -80.0, -200.0, float("inf"), float("nan")])
    gate_up = torch.cat((gate, torch.ones_like(gate))).unsqueeze(0)
    torch.testing.assert_close(gated(gate_up)[0, :9], torch.nn.functional.silu(gate[:9]), rtol=2e-6, atol=1e-35)
    for kind in KINDS:
        out = gated(gate_up, kind)[0]
        assert out[9].isnan()
        assert not out[:8].isnan().any()


@needs_native
def test_the_clamped_activation_is_limited() -> None:
    gate_up = torch.tensor([[100.0, 7.0, 3.0, 3.0, 50.0, 7.0, 99.0, -99.0]])
    out = gated(gate_up, "clamped_swiglu")[0]
    assert out[0] == out[1]
    torch.testing.assert_close(out[2:], gated_reference(torch.tensor([[3.0, 3.0, 7.0, -7.0]]), "clamped_swiglu")[0])


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_a_row_do_not_depend_on_other_rows(kind: Activation) -> None:
    gate_up = torch.randn(33, 74, generator=generator(1))
    together = gated(gate_up, kind)
    for i in range(33):
        assert torch.equal(gated(gate_up[i : i + 1], kind)[0], together[i])

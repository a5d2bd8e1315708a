import pytest
import torch

from paceline.kernels.cpu import native
from paceline.kernels.linear import linear
from paceline.kernels.weights import Dense
from paceline.models.drafts.vocabulary import prepare_draft

CPU = torch.device("cpu")


@pytest.mark.skipif(not native.available(), reason="needs a C compiler")
def test_a_drafts_matrices_are_8_bit_on_the_cpu() -> None:
    torch.manual_seed(0)
    values, x = torch.randn(40, 64), torch.randn(3, 64)
    weight = prepare_draft(Dense(values), CPU, torch.float32)
    assert weight.nbytes < 0.6 * values.nbytes
    away = (linear(x, weight) - x @ values.T).norm() / (x @ values.T).norm()
    assert 0 < away < 0.01


def test_what_the_kernels_take_no_groups_of_stays_as_it_is() -> None:
    values, x = torch.randn(40, 20), torch.randn(3, 20)
    torch.testing.assert_close(linear(x, prepare_draft(Dense(values), CPU, torch.float32)), x @ values.T)

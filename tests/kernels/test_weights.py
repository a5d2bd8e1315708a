import pytest
import torch

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.weights import Dense, Grouped, concat
from tests.kernels.cases import make_weight


def test_dequantize_is_code_times_scale_plus_offset() -> None:
    codes = torch.arange(64, dtype=torch.uint8).view(2, 32) % 16
    weight = Grouped(codes, torch.tensor([[0.5], [2.0]]), torch.tensor([[1.0], [-3.0]]), 32)
    assert torch.equal(weight.dequantize()[0], codes[0] * 0.5 + 1)
    assert torch.equal(weight.dequantize()[1], codes[1] * 2.0 - 3)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("q4_32", "q4_32"), (torch.uint8, 32, True)),
        (("q8_32", "q8_32"), (torch.int8, 32, False)),
        (("q4_32", "q8_16"), (torch.int8, 16, True)),
        (("q4_16", "q4_32_plain"), (torch.uint8, 16, True)),
    ],
)
def test_concat_keeps_quantised_weights_quantised(kinds: tuple[str, str], expected: tuple[object, ...]) -> None:
    weights = [make_weight(kind, 8 + i, 64, seed=i) for i, kind in enumerate(kinds)]
    joined = concat(weights)
    assert isinstance(joined, Grouped)
    assert (joined.codes.dtype, joined.group, joined.offsets is not None) == expected
    assert torch.equal(joined.dequantize(), torch.cat([weight.dequantize() for weight in weights]))


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [
        (("bfloat16", "bfloat16"), torch.bfloat16),
        (("bfloat16", "float16"), torch.float32),
        (("q4_32", "bfloat16"), torch.float32),
    ],
)
def test_concat_of_dense(kinds: tuple[str, str], dtype: torch.dtype) -> None:
    weights = [make_weight(kind, 8, 64, seed=i) for i, kind in enumerate(kinds)]
    joined = concat(weights)
    assert isinstance(joined, Dense)
    assert joined.values.dtype == dtype
    assert torch.equal(joined.dequantize(), torch.cat([weight.dequantize() for weight in weights]))


def test_unsupported_groups_are_rejected() -> None:
    with pytest.raises(UnsupportedModel, match="groups of 64"):
        Grouped(torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 1), None, 64)
    with pytest.raises(ValueError, match="scales"):
        Grouped(torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 1), None, 32)

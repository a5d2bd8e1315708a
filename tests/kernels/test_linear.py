from dataclasses import replace

import pytest
import torch

from paceline.kernels.cpu import native
from paceline.kernels.formats.linear import DenseWeight
from paceline.kernels.formats.packing import PackedWeight
from paceline.kernels.formats.weights import Dense, Grouped
from paceline.kernels.linear import embedding_rows, linear, prepare
from tests.kernels.cases import FORMATS, generator, make_weight, needs_native

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 33)


def test_a_dense_weight_uses_the_torch_product() -> None:
    weight = make_weight("q4_32", 40, 64)
    prepared = prepare(weight, "cpu", torch.bfloat16)
    assert isinstance(prepared, DenseWeight)
    x = torch.randn(3, 64, generator=generator(1)).bfloat16()
    assert torch.equal(linear(x, prepared), x @ weight.dequantize().bfloat16().T)
    assert torch.equal(embedding_rows(prepared, torch.tensor([3, 39])), weight.dequantize().bfloat16()[[3, 39]])


@needs_native
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (33, 96), (100, 160), (7, 32)])
def test_native_is_close_to_double_precision(kind: str, outputs: int, inputs: int) -> None:
    weight = make_weight(kind, outputs, inputs)
    prepared = prepare(weight, "cpu", torch.float32)
    assert isinstance(prepared, PackedWeight)
    assert prepared.shape == (outputs, inputs)
    bias = torch.randn(outputs, generator=generator(5))
    for rows in (*ROWS, 200):
        x = torch.randn(rows, inputs, generator=generator(rows))
        exact = x.double() @ weight.dequantize().double().T
        # each term may have an error of one ulp, offsets and scaled codes separately
        size = x.double().abs() @ weight.dequantize().double().abs().T + 32 * x.double().abs().sum(1, keepdim=True)
        assert ((linear(x, prepared) - exact).abs() <= 2e-6 * size).all()
        assert ((linear(x, prepared, bias) - (exact + bias)).abs() <= 2e-6 * size + 1e-6).all()


@needs_native
@pytest.mark.parametrize("inputs", [16, 48, 80])
@pytest.mark.parametrize("kind", ["q4_16", "q8_16", "float32"])
def test_inputs_need_not_be_a_multiple_of_32(kind: str, inputs: int) -> None:
    weight = make_weight(kind, 40, inputs)
    x = torch.randn(5, inputs, generator=generator(2))
    out = linear(x, prepare(weight, "cpu", torch.float32))
    torch.testing.assert_close(out, x @ weight.dequantize().T, rtol=1e-4, atol=1e-4)


@needs_native
@pytest.mark.parametrize("kind", FORMATS)
def test_the_bits_of_a_row_do_not_depend_on_other_rows(kind: str) -> None:
    weight = prepare(make_weight(kind, 200, 192), "cpu", torch.float32)
    x = torch.randn(200, 192, generator=generator(3))
    x[7] *= 1e-36  # products must underflow for every number of rows
    alone = torch.cat([linear(x[i : i + 1], weight) for i in range(len(x))])
    for threads in (1, 2, 3):
        native.set_num_threads(threads)
        for rows in (*ROWS, 200):
            for first in (0, 200 - rows):
                block = slice(first, first + rows)
                assert torch.equal(linear(x[block], weight), alone[block]), (threads, rows)


@needs_native
@pytest.mark.parametrize("kind", FORMATS)
def test_embedding_rows_are_the_dequantised_bits(kind: str) -> None:
    weight = make_weight(kind, 75, 96)
    ids = torch.tensor([0, 74, 31, 32, 5, 5, 64])
    assert torch.equal(embedding_rows(prepare(weight, "cpu", torch.float32), ids), weight.dequantize()[ids])


@needs_native
@pytest.mark.parametrize("bad", [-1, 75])
def test_ids_outside_the_vocabulary_are_rejected(bad: int) -> None:
    with pytest.raises(IndexError, match="75"):
        embedding_rows(prepare(make_weight("q8_32", 75, 32), "cpu", torch.float32), torch.tensor([0, bad]))


@needs_native
@pytest.mark.parametrize(("kind", "scale_bytes"), [("q4_32", 4), ("q4_32_half", 2)])
def test_quantised_weights_stay_small(kind: str, scale_bytes: int) -> None:
    packed = prepare(make_weight(kind, 64, 128), "cpu", torch.float32)
    assert packed.nbytes == 64 * 128 // 2 + 2 * 64 * 128 // 32 * scale_bytes


@needs_native
@pytest.mark.parametrize("inexact", ["scales", "offsets"])
def test_half_precision_scales_are_exact(inexact: str) -> None:
    """One value that float16 cannot represent keeps the scales of the whole matrix in float32."""
    half = make_weight("q4_32_half", 65, 128)
    assert isinstance(half, Grouped)
    assert half.offsets is not None
    parts = {"scales": half.scales.clone(), "offsets": half.offsets.clone()}
    parts[inexact][64, 0] = 1 / 3
    packed = [
        prepare(half, "cpu", torch.float32),
        prepare(replace(half, **parts), "cpu", torch.float32),
    ]
    assert packed[0].nbytes < packed[1].nbytes
    for rows in (1, 20):
        x = torch.randn(rows, 128, generator=generator(6))
        outs = [linear(x, weight) for weight in packed]
        assert torch.equal(outs[0][:, :64], outs[1][:, :64])


@needs_native
def test_an_input_without_rows() -> None:
    assert linear(torch.empty(0, 32), prepare(Dense(torch.ones(3, 32)), "cpu", torch.float32)).shape == (0, 3)

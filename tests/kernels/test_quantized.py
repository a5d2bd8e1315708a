from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.kernels.cpu import native
from paceline.kernels.formats.packing import PackedWeight
from paceline.kernels.formats.quantized import Quantization, QuantizedWeight, put, quantize, saturate, take
from paceline.kernels.formats.weights import Dense, concat, grouped
from paceline.kernels.linear import linear, prepare

# relative to the largest weight of an output: half a step of 127, and half of the last of three mantissa bits
ERROR: dict[Quantization, float] = {"int8": 0.5 / 127, "fp8": 2**-4}


def matrix(outputs: int = 48, inputs: int = 160, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, inputs, generator=generator) * torch.logspace(-3, 2, outputs).unsqueeze(1)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_every_output_has_its_own_scale(kind: Quantization) -> None:
    values = matrix()
    weight = quantize(values, kind)
    largest = values.abs().amax(1, keepdim=True)
    assert weight.shape == (48, 160)
    assert weight.nbytes == 48 * 160 + 4 * 48
    assert ((weight.dequantize() - values).abs() <= ERROR[kind] * largest * 1.001).all()
    assert torch.allclose(weight.dequantize().abs().amax(1, keepdim=True), largest)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_an_output_of_zeros_stays_zero(kind: Quantization) -> None:
    values = matrix()
    values[3] = 0
    assert torch.equal(quantize(values, kind).dequantize()[3], torch.zeros(160))


def grouped_scales(kind: Quantization, inputs: int) -> QuantizedWeight:
    weight = quantize(matrix(inputs=inputs), kind)
    scales = torch.rand(48, -(-inputs // 128), generator=torch.Generator().manual_seed(1)) + 0.5
    return QuantizedWeight(weight.values, scales)


@pytest.mark.parametrize("inputs", [128, 160, 384])
def test_scales_of_128_inputs_each(inputs: int) -> None:
    weight = grouped_scales("fp8", inputs)
    wide = weight.dequantize()
    for column in range(0, inputs, 31):
        assert torch.equal(wide[:, column], weight.values[:, column].float() * weight.scales[:, column // 128])


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scales", ["output", "group"])
def test_the_product_uses_the_dequantised_values(kind: Quantization, dtype: torch.dtype, scales: str) -> None:
    weight = quantize(matrix(), kind) if scales == "output" else grouped_scales(kind, 160)
    x = torch.randn(5, 160, generator=torch.Generator().manual_seed(2)).to(dtype)
    bias = torch.randn(48, generator=torch.Generator().manual_seed(3)).to(dtype)
    codes = grouped(weight) if dtype == torch.float32 and native.available() else None
    prepared = prepare(weight if codes is None else replace(codes, activations="float32"), "cpu", dtype)
    if kind == "int8" and dtype == torch.float32 and native.available():
        assert isinstance(prepared, PackedWeight)
    expected = (x.double() @ weight.dequantize().double().T + bias.double()).to(dtype)
    error = (linear(x, prepared, bias) - expected).abs().max() / expected.abs().max()
    assert error < (1e-6 if dtype == torch.float32 else 2**-8)


def test_inputs_that_do_not_divide_into_groups_use_the_reference() -> None:
    weight = quantize(matrix(inputs=40), "int8")
    assert isinstance(prepare(weight, "cpu", torch.float32), QuantizedWeight)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_concat_equals_the_concatenation_of_the_values(kind: Quantization) -> None:
    first, second = matrix(inputs=256), matrix(16, inputs=256, seed=5)
    joined = concat([quantize(first, kind), quantize(second, kind)])
    whole = quantize(torch.cat((first, second)), kind)
    assert isinstance(joined, QuantizedWeight)
    assert torch.equal(joined.dequantize(), whole.dequantize())
    mixed = concat([grouped_scales(kind, 256), quantize(second, kind)])
    assert isinstance(mixed, QuantizedWeight)
    assert mixed.scales.shape == (64, 2)
    assert torch.equal(mixed.dequantize()[48:], whole.dequantize()[48:])


def test_concat_of_mixed_formats_is_dense() -> None:
    parts: list[Any] = [quantize(matrix(), "fp8"), quantize(matrix(), "int8"), Dense(matrix())]
    joined = concat(parts)
    assert isinstance(joined, Dense)
    assert torch.equal(joined.values, torch.cat([part.dequantize() for part in parts]))


def test_wrong_shapes_and_types_are_rejected() -> None:
    values = quantize(matrix(), "int8").values
    with pytest.raises(ValueError, match="do not match"):
        QuantizedWeight(values, torch.ones(48, 3))
    with pytest.raises(ValueError, match="must be int8 or fp8"):
        QuantizedWeight(values.short(), torch.ones(48, 1))


def test_a_float8_table_saturates_and_can_be_indexed() -> None:
    table = torch.zeros(6, 2, dtype=torch.float8_e4m3fn)
    rows = torch.tensor([[1.0, -1000.0], [torch.inf, 3.3]])
    put(table, torch.tensor([4, 1]), saturate(rows, table.dtype))
    assert take(table, torch.tensor([4, 1])).float().tolist() == [[1.0, -448.0], [448.0, 3.25]]
    assert take(table, torch.tensor([0])).float().tolist() == [[0.0, 0.0]]

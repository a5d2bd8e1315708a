"""Products with 4-bit weights against the dequantised matrix."""

import pytest
import torch
from torch import Tensor

from paceline.kernels.formats.four_bit import FourBitWeight, concat, pack
from paceline.kernels.formats.linear import DenseWeight
from paceline.kernels.formats.weights import FourBit
from paceline.kernels.gpu.linear import add_linear, gate_up, linear, qkv_rotary_store
from paceline.kernels.gpu.normed import Normed
from paceline.kernels.gpu.tiles import Tile, four_bit_tile, whole_blocks
from paceline.models.weights.family_weights import unpack_mxfp4
from tests.kernels.cases import generator
from tests.kernels.gpu.cases import DEVICE

FORMATS = ["float16 128", "bfloat16 64", "float16 32", "mxfp4 32"]
SMALL = Tile(32, 128, 2, 2, 0)


def stored(outputs: int, inputs: int, form: str, seed: int = 0) -> FourBit:
    """A random matrix as a checkpoint has it."""
    kind, group = form.split()[0], int(form.split()[1])
    draw = generator(seed)
    if kind == "mxfp4":
        blocks = torch.randint(0, 256, (outputs, inputs // 32, 16), generator=draw, dtype=torch.uint8)
        return unpack_mxfp4(blocks, torch.randint(118, 124, (outputs, inputs // 32), generator=draw, dtype=torch.uint8))
    dtype = torch.float16 if kind == "float16" else torch.bfloat16
    codes = torch.randint(0, 16, (outputs, inputs), generator=draw, dtype=torch.uint8)
    scales = (torch.rand(outputs, inputs // group, generator=draw) * 0.02 + 0.001).to(dtype).float()
    zeros = torch.randint(0, 17, scales.shape, generator=draw).float()
    fine = [one.repeat_interleave(group // 32, 1) for one in (scales, -zeros * scales)]
    return FourBit(codes, *fine, 32, stored_group=group, scale_dtype=dtype)


def packed(outputs: int, inputs: int, form: str, seed: int = 0) -> FourBitWeight:
    weight = pack(stored(outputs, inputs, form, seed), DEVICE)
    assert weight is not None
    return weight


def draw(*shape: int, seed: int = 9) -> Tensor:
    return torch.randn(shape, generator=generator(seed)).to(DEVICE)


def normed(x: Tensor) -> Normed:
    return Normed(x, (x.square() * 2**24).long().sum(1, keepdim=True), 1e-5)


def apply(x: Normed) -> Tensor:
    return x.scaled * torch.rsqrt(x.squares.sum(1, keepdim=True) / 2**24 / x.scaled.shape[1] + x.eps)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 256), (40, 384)])
def test_packing_keeps_every_value(form: str, outputs: int, inputs: int) -> None:
    weight = stored(outputs, inputs, form)
    ours = pack(weight, DEVICE)
    assert ours is not None
    assert ours.kind == form.split()[0]
    assert ours.group == (64 if ours.kind == "mxfp4" else int(form.split()[1]))
    assert torch.equal(ours.dequantize().cpu(), weight.dequantize())
    again = pack(ours.unpack(), DEVICE)
    assert again is not None
    assert torch.equal(again.codes, ours.codes)
    assert torch.equal(again.words, ours.words)


def test_codes_of_a_group_of_128_take_16_bits_more() -> None:
    weight = packed(64, 1024, "float16 128")
    assert weight.nbytes * 8 == 64 * 1024 * 4.25


def test_offsets_that_are_no_zeros_are_not_packed() -> None:
    weight = stored(16, 128, "float16 32")
    assert weight.offsets is not None
    weight.offsets[3, 1] += 1e-3
    assert pack(weight, DEVICE) is None


def test_matrices_are_joined_along_the_outputs() -> None:
    parts = [packed(48, 128, "float16 64", seed=i) for i in range(3)]
    joined = concat(parts)
    assert joined is not None
    assert torch.equal(joined.dequantize(), torch.cat([one.dequantize() for one in parts]))
    assert concat([parts[0], packed(48, 128, "float16 32")]) is None


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("rows", "outputs", "inputs", "tile"), [
    (1, 64, 256, None),
    (3, 48, 384, Tile(32, 256, 2, 2, 0)),
    (5, 64, 512, Tile(32, 128, 2, 2, 0, splits=2)),
    (20, 64, 128, None),
    (70, 40, 128, None),
])  # fmt: skip
def test_a_product_equals_that_of_the_dequantised_matrix(
    form: str, rows: int, outputs: int, inputs: int, tile: Tile | None
) -> None:
    weight, x, bias = packed(outputs, inputs, form), draw(rows, inputs), draw(outputs, seed=4)
    close(linear(x, weight, bias, tile=tile), x @ weight.dequantize().t() + bias)


def test_inputs_that_no_block_divides() -> None:
    weight, x = packed(32, 160, "mxfp4 32"), draw(2, 160)
    close(linear(x, weight, tile=SMALL), x @ weight.dequantize().t())


@pytest.mark.parametrize("splits", [1, 2])
def test_gate_and_up_and_the_sum_after_them(splits: int) -> None:
    tile = Tile(32, 128, 2, 2, 0, splits=splits)
    weight, x = packed(2 * 48, 256, "float16 128"), normed(draw(3, 256))
    gate, up = (apply(x) @ weight.dequantize().t()).chunk(2, 1)
    inner = torch.nn.functional.silu(gate) * up
    close(gate_up(x, weight, tile), inner)
    down, residual, norm = packed(64, 48 * 4, "bfloat16 64"), draw(3, 64, seed=5), draw(64, seed=6)
    wide = draw(3, 48 * 4, seed=7)
    hidden, after = add_linear(wide, down, residual, norm, 1e-5, tile)
    close(hidden, residual + wide @ down.dequantize().t())
    close(after.scaled, hidden * norm)
    close(after.squares.sum(1) / 2**24, hidden.square().sum(1))


@pytest.mark.parametrize("splits", [1, 2])
def test_queries_keys_and_values_as_with_dense_weights(splits: int) -> None:
    weight, x = packed(4 * 32, 256, "float16 128"), normed(draw(3, 256))
    angles, places = draw(16, 16, seed=3), torch.tensor([3, 4, 7], device=DEVICE)
    found = []
    for matrix, tile in ((weight, Tile(32, 128, 2, 2, 0, splits=splits)), (DenseWeight(weight.dequantize()), None)):
        keys, values = (torch.zeros(2, 16, 1, 32, device=DEVICE) for _ in range(2))
        q = qkv_rotary_store(x, matrix, None, angles.cos(), angles.sin(), places, places, keys, values, 2, tile)
        found.append((q, keys, values))
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="the interpreter has no bfloat16 instructions")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), [(1024, 2048), (4096, 1024), (2880, 2880)])
@pytest.mark.parametrize("rows", [1, 5, 16, 40, 200])
def test_products_in_bfloat16(form: str, outputs: int, inputs: int, rows: int) -> None:
    inputs = inputs // 128 * 128 if "mxfp4" not in form else inputs
    weight, x = packed(outputs, inputs, form), draw(rows, inputs).bfloat16()
    ours = linear(x, weight, out_dtype=torch.float32)
    expected = (x.double() @ weight.dequantize().double().t()).float()
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="the interpreter's matrix product rounds by its shape")
@pytest.mark.parametrize("form", FORMATS)
def test_the_bits_of_up_to_16_rows_do_not_depend_on_other_rows(form: str) -> None:
    weight, x = packed(1024, 2048, form), draw(16, 2048).bfloat16()
    together, pairs = linear(x, weight), gate_up(normed(x), weight)
    for first, end in ((0, 1), (1, 6), (3, 12)):
        assert torch.equal(linear(x[first:end], weight), together[first:end])
        assert torch.equal(gate_up(normed(x[first:end]), weight), pairs[first:end])


@pytest.mark.parametrize("inputs", [128, 2880, 4096, 14336])
def test_tiles_divide_the_blocks_of_inputs(inputs: int) -> None:
    tile = whole_blocks(Tile(64, 512, 2, 4, splits=4), inputs)
    assert -(-inputs // 128) * 128 % (tile.inputs * tile.splits) == 0


def test_up_to_16_rows_have_one_tile() -> None:
    assert len({four_bit_tile(rows, 6144, 4096, is_paired=True) for rows in range(1, 17)}) == 1
    assert four_bit_tile(1, 4096, 4096, is_paired=False).splits > 1

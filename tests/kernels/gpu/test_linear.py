"""The fused products against compositions of the references, for every kind of weight."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.kernels.activation import gated_reference
from paceline.kernels.formats.linear import DenseWeight, LinearWeight
from paceline.kernels.formats.quantized import GROUP, LARGEST, QuantizedWeight, quantize
from paceline.kernels.gpu.linear import add_linear, embed, gate_up, linear, qkv_rotary_store
from paceline.kernels.gpu.normed import Normed
from paceline.kernels.gpu.tiles import Tile
from paceline.kernels.linear import linear as linear_reference
from paceline.kernels.rms_norm import rms_norm_reference
from paceline.kernels.rotary import apply_rotary_and_store_reference
from tests.kernels.cases import generator
from tests.kernels.gpu.cases import DEVICE, on_device

EPS = 1e-5
KINDS = ("dense", "int8", "fp8", "int8 in groups", "fp8 in groups")
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}
BLOCKS, POSITIONS = 6, 50


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill outputs with NaN, so that missing writes are detected."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *size, **options: _poisoned(empty(*size, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda other, **options: _poisoned(empty_like(other, **options)))


def _poisoned(values: Tensor) -> Tensor:
    return values.fill_(torch.nan) if values.is_floating_point() and values.element_size() > 1 else values


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


def weight_of(kind: str, outputs: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> LinearWeight:
    values = random(outputs, inputs, seed=seed) / inputs**0.5
    if kind == "dense":
        return DenseWeight(values.to(dtype))
    if not kind.endswith("groups"):
        return quantize(values, "int8" if kind == "int8" else "fp8")
    stored = torch.int8 if kind.startswith("int8") else torch.float8_e4m3fn
    scales = (1 + torch.rand(outputs, -(-inputs // GROUP), generator=generator(seed + 1))) / inputs**0.5 / 100
    codes = random(outputs, inputs, seed=seed) * 100
    return QuantizedWeight(codes.clamp(-LARGEST[stored], LARGEST[stored]).to(stored), scales)


def there(weight: LinearWeight) -> LinearWeight:
    if isinstance(weight, DenseWeight):
        return DenseWeight(*on_device(weight.values))
    assert isinstance(weight, QuantizedWeight)
    return QuantizedWeight(*on_device(weight.values, weight.scales))


def wide(weight: LinearWeight) -> LinearWeight:
    """The same values in float32: references round once, like the kernels."""
    return DenseWeight(weight.values.float() if isinstance(weight, DenseWeight) else weight.dequantize())


def units(hidden: Tensor) -> Tensor:
    """Squares as whole numbers of 2^-24."""
    return (hidden.float().square() * 2**24).long()


def normed(hidden: Tensor, norm: Tensor, strips: int = 3) -> Normed:
    """The `Normed` that a kernel leaves, with squares summed over strips of unequal width."""
    squares = torch.stack([units(part).sum(1) for part in hidden.tensor_split(strips, 1)], 1)
    scaled = (hidden.float() * norm.float()).to(hidden.dtype)
    return Normed(*on_device(scaled, squares), EPS)


def close(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(ours.cpu().float(), theirs.float(), rtol=tolerance, atol=tolerance, equal_nan=True)
    assert not theirs.isnan().all()


def finished(state: Normed) -> Tensor:
    factor = torch.rsqrt(state.squares.sum(1, keepdim=True) / 2**24 / state.scaled.shape[1] + state.eps)
    return state.scaled.float() * factor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(kind: str, dtype: torch.dtype, has_bias: bool) -> None:
    weight, x = weight_of(kind, 40, 200, dtype), random(5, 200, seed=5, dtype=dtype)
    bias = random(40, seed=6, dtype=dtype) if has_bias else None
    expected = linear_reference(x.float(), wide(weight), None if bias is None else bias.float())
    ours = linear(x.to(DEVICE), there(weight), None if bias is None else bias.to(DEVICE))
    assert ours.dtype is dtype
    close(ours, expected, dtype)


@pytest.mark.parametrize("rows", [1, 8, 9, 20, 64])
def test_any_number_of_rows(rows: int) -> None:
    weight, x = weight_of("dense", 24, 72, torch.float32), random(rows, 72, seed=5)
    close(linear(x.to(DEVICE), there(weight)), linear_reference(x, weight), torch.float32)


@pytest.mark.parametrize("tile", [Tile(64, 32, 4, 3), Tile(16, 128, 1, 5), Tile(32, 64, 2, 2, ahead=1)])
def test_any_tile(tile: Tile) -> None:
    weight, x = weight_of("dense", 70, 136, torch.float32), random(3, 136, seed=5)
    close(linear(x.to(DEVICE), there(weight), tile=tile), linear_reference(x, weight), torch.float32)
    pairs = gate_up(normed(x, torch.ones(136)), there(weight), tile=tile)
    gated = gated_reference(linear_reference(rms_norm_reference(x, torch.ones(136), EPS), weight))
    close(pairs, gated, torch.float32)


@pytest.mark.parametrize("rows", [65, 128, 200])
@pytest.mark.parametrize("kind", ["int8", "fp8", "fp8 in groups"])
@pytest.mark.parametrize("tile", [Tile(64, 64, 4, 3, rows=128), Tile(32, 128, 4, 3, splits=2, rows=128)])
def test_many_rows_in_a_program(tile: Tile, kind: str, rows: int) -> None:
    weight, x, ones = weight_of(kind, 72, 264, torch.bfloat16), random(rows, 264, seed=5).bfloat16(), torch.ones(264)
    expected = linear_reference(x.float(), wide(weight))
    close(linear(x.to(DEVICE), there(weight), tile=tile), expected, torch.bfloat16)
    residual = random(rows, 72, seed=6).bfloat16()
    hidden, _ = add_linear(x.to(DEVICE), there(weight), residual.to(DEVICE), ones[:72].to(DEVICE), EPS, tile)
    close(hidden, expected + residual.float(), torch.bfloat16)
    if tile.splits == 1:
        gated = gated_reference(linear_reference(rms_norm_reference(x.float(), ones, EPS), wide(weight)))
        close(gate_up(normed(x, ones), there(weight), tile=tile), gated, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_added_to_the_residual_and_prepared_for_the_next_norm(kind: str, dtype: torch.dtype) -> None:
    weight, x = weight_of(kind, 56, 136, dtype), random(5, 136, seed=5, dtype=dtype)
    residual, norm = random(5, 56, seed=6, dtype=dtype), random(56, seed=7, dtype=dtype)
    expected = residual.float() + linear_reference(x.float(), wide(weight))
    other = residual.to(DEVICE)
    hidden, following = add_linear(x.to(DEVICE), there(weight), other, norm.to(DEVICE), EPS)
    close(hidden, expected, dtype)
    close(finished(following), rms_norm_reference(expected, norm.float(), EPS), dtype)
    assert torch.equal(other.cpu(), residual)
    # the next product applies the norm
    next_weight = weight_of("dense", 20, 56, dtype, seed=9)
    after = linear_reference(rms_norm_reference(hidden.cpu().float(), norm.float(), EPS), wide(next_weight))
    close(gate_up(following, there(next_weight)), gated_reference(after), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_gate_and_up(kind: str, dtype: torch.dtype) -> None:
    weight, hidden = weight_of(kind, 2 * 21, 136, dtype), random(9, 136, seed=5, dtype=dtype)
    norm = random(136, seed=7, dtype=dtype)
    both = linear_reference(rms_norm_reference(hidden.float(), norm.float(), EPS), wide(weight))
    ours = gate_up(normed(hidden, norm), there(weight))
    assert ours.shape == (9, 21)
    close(ours, gated_reference(both), dtype)


def check_qkv(
    kind: str,
    dtype: torch.dtype,
    rows: int = 5,
    heads: tuple[int, int, int] = (3, 1, 16),
    inputs: int = 72,
    has_bias: bool = False,
) -> None:
    num_heads, kv_heads, width = heads
    outputs = (num_heads + 2 * kv_heads) * width
    weight, hidden = weight_of(kind, outputs, inputs, dtype), random(rows, inputs, seed=5, dtype=dtype)
    norm, bias = random(inputs, seed=7, dtype=dtype), random(outputs, seed=8, dtype=dtype) if has_bias else None
    angles = torch.rand(POSITIONS, width // 2, generator=generator(9)) * 6
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(0, POSITIONS, (rows,), generator=generator(10))
    slots = torch.randperm(BLOCKS * 16, generator=generator(11))[:rows]
    shape = (BLOCKS, 16, kv_heads, width)
    expected_keys, expected_values = (torch.full(shape, torch.nan) for _ in range(2))
    qkv = linear_reference(
        rms_norm_reference(hidden.float(), norm.float(), EPS), wide(weight), None if bias is None else bias.float()
    )
    expected = apply_rotary_and_store_reference(
        qkv, cos[positions], sin[positions], expected_keys, expected_values, slots, num_heads, kv_heads
    )
    keys, values = (torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
    places = on_device(cos, sin, positions, slots)
    bias = None if bias is None else bias.to(DEVICE)
    query = qkv_rotary_store(normed(hidden, norm), there(weight), bias, *places, keys, values, num_heads)
    assert query.shape == (rows, num_heads, width)
    close(query, expected, dtype)
    close(keys, expected_keys, dtype)  # NaN in slots of no row
    close(values, expected_values, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_rotated_and_stored(kind: str, dtype: torch.dtype) -> None:
    check_qkv(kind, dtype, inputs=136)


@pytest.mark.parametrize("heads", [(2, 2, 8), (1, 1, 40), (5, 1, 24)])
def test_heads_that_span_two_strips(heads: tuple[int, int, int]) -> None:
    check_qkv("dense", torch.float32, heads=heads)


@pytest.mark.parametrize("rows", [1, 9, 20, 64])
def test_heads_of_any_number_of_rows(rows: int) -> None:
    check_qkv("dense", torch.float32, rows, has_bias=True)


def test_the_bias_is_rotated_too() -> None:
    check_qkv("int8", torch.bfloat16, has_bias=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_embedding_is_prepared_for_the_first_norm(dtype: torch.dtype) -> None:
    table, norm = random(11, 72, seed=1, dtype=dtype), random(72, seed=2, dtype=dtype)
    ids = torch.tensor([3, 10, 3, 0])
    hidden, following = embed(*on_device(ids, table, norm), EPS)
    assert torch.equal(hidden.cpu(), table[ids])
    close(finished(following), rms_norm_reference(table[ids].float(), norm.float(), EPS), dtype)


PRODUCTS: dict[str, Callable[[Tensor, LinearWeight], Tensor]] = {
    "linear": linear,
    "add_linear": lambda x, weight: add_linear(x, weight, x[:, :48].contiguous(), x[0, :48].contiguous(), EPS)[0],
    "squares": lambda x, weight: add_linear(x, weight, x[:, :48].contiguous(), x[0, :48].contiguous(), EPS)[1].squares,
    "gate_up": lambda x, weight: gate_up(Normed(x, units(x).sum(1, keepdim=True), EPS), weight),
    "strips": lambda x, weight: gate_up(Normed(x, units(x)[:, :200].contiguous(), EPS), weight),
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("kind", ["dense", "fp8 in groups"])
def test_the_bits_of_a_row_do_not_depend_on_the_number_of_rows(product: str, kind: str) -> None:
    weight = there(weight_of(kind, 48, 264, torch.bfloat16))
    x = random(16, 264, seed=5, dtype=torch.bfloat16).to(DEVICE)
    alone = PRODUCTS[product](x[:1], weight)
    for rows in (5, 16):
        assert torch.equal(PRODUCTS[product](x[:rows], weight)[:1], alone)

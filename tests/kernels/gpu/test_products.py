import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.kernels.formats.linear import DenseWeight
from paceline.kernels.gpu import products
from paceline.kernels.gpu.attention.rotary import rotate_and_store
from paceline.kernels.gpu.gated import gated
from paceline.kernels.gpu.linear import add_linear, embed, gate_up, linear, qkv_rotary_store
from paceline.kernels.gpu.normed import Normed
from paceline.kernels.gpu.products import VendorCheck, product
from paceline.kernels.gpu.rms_norm import add_norm
from paceline.kernels.gpu.tiles import MEASURED, Tile
from tests.kernels.cases import generator
from tests.kernels.gpu.cases import DEVICE

EPS = 1e-5
WIDTH, INNER, HEADS, KV_HEADS, HEAD = 128, 64, 3, 1, 16


def whole(*shape: int, seed: int, scale: float = 0.0625) -> Tensor:
    """Small whole numbers times `scale`: sums of their products are exact in any order, so that only the places where a
    kernel rounds can change a bit."""
    return (torch.randint(-7, 8, shape, generator=generator(seed)) * scale).to(DEVICE, torch.bfloat16)


def dense(outputs: int, inputs: int, seed: int) -> DenseWeight:
    return DenseWeight(whole(outputs, inputs, seed=seed))


def states(rows: int) -> tuple[Tensor, Normed]:
    norm = 2.0 ** torch.randint(-1, 2, (WIDTH,), generator=generator(1)).to(DEVICE, torch.bfloat16)
    ids = torch.arange(rows, device=DEVICE)
    return embed(ids, whole(rows, WIDTH, seed=2, scale=0.25), norm, EPS)


def test_gate_and_up_have_the_bits_of_a_product_and_an_activation() -> None:
    _, normed = states(5)
    weight = dense(2 * INNER, WIDTH, seed=3)
    fused, separate = gate_up(normed, weight), gated(linear(normed.scaled, weight), "silu", normed)
    assert torch.equal(fused, separate)
    # A fused kernel that does not round the product first has other bits
    unrounded = gated(linear(normed.scaled, weight, out_dtype=torch.float32), "silu", normed).to(torch.bfloat16)
    assert not torch.equal(fused, unrounded)


@pytest.mark.parametrize("has_bias", [False, True])
def test_queries_have_the_bits_of_a_product_and_a_rotation(has_bias: bool) -> None:
    rows = 5
    _, normed = states(rows)
    weight = dense((HEADS + 2 * KV_HEADS) * HEAD, WIDTH, seed=3)
    bias = torch.randn(weight.shape[0], generator=generator(4)).to(DEVICE, torch.bfloat16) if has_bias else None
    angles = torch.rand(2, 32, HEAD // 2, generator=generator(5)).to(DEVICE)
    positions = torch.arange(rows, device=DEVICE) + 3
    caches = [torch.zeros(4, 2, 16, KV_HEADS, HEAD, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    table = torch.tensor([[1, 0]], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, rows], dtype=torch.int32, device=DEVICE)
    context = torch.tensor([14], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([16 + 14, 16 + 15, 0, 1, 2], device=DEVICE)
    fused = qkv_rotary_store(normed, weight, bias, *angles, positions, slots, *caches[0][:2], HEADS)
    separate = rotate_and_store(
        linear(normed.scaled, weight), positions, *angles, *caches[1][:2], starts, context, table,
        before=normed, bias=bias,
    )  # fmt: skip
    assert torch.equal(fused, separate)
    assert torch.equal(caches[0], caches[1])
    assert caches[0].any()


def test_the_residual_stream_has_the_bits_of_a_product_and_an_addition() -> None:
    hidden, _ = states(5)
    x, weight, norm = whole(5, INNER, seed=6), dense(WIDTH, INNER, seed=7), whole(WIDTH, seed=8)
    # Sums that need more than the eight bits of a bfloat16
    residual = hidden + torch.rand(hidden.shape, generator=generator(9)).to(DEVICE, torch.bfloat16)
    fused, after = add_linear(x, weight, residual, norm, EPS)
    separate, following = add_norm(linear(x, weight), residual, norm, EPS)
    assert torch.equal(fused, separate)
    assert torch.equal(after.scaled, following.scaled)
    assert torch.equal(after.squares.sum(1), following.squares.sum(1))
    unrounded = (linear(x, weight, out_dtype=torch.float32) + residual.float()).to(torch.bfloat16)
    assert not torch.equal(fused, unrounded)


def test_squares_do_not_depend_on_the_strips() -> None:
    """Sums of float32 do."""
    x, residual, norm = whole(5, INNER, seed=6), whole(5, WIDTH, seed=5), whole(WIDTH, seed=8)
    residual += torch.randn(5, WIDTH, generator=generator(9)).to(DEVICE, torch.bfloat16) * 30
    weight = dense(WIDTH, INNER, seed=7)
    sums = {
        outputs: add_linear(x, weight, residual, norm, EPS, Tile(outputs, 64, 1, 2))[1].squares for outputs in (16, 64)
    }
    assert sums[16].shape[1] != sums[64].shape[1]
    assert torch.equal(sums[16].sum(1), sums[64].sum(1))


def test_a_check_is_kept_for_the_same_versions(tmp_path: Path) -> None:
    calls = list[int]()

    def compare(x: Tensor, *_: object) -> bool:
        calls.append(len(x))
        return len(x) != 9

    file, weight = tmp_path / "deeper" / "products.json", dense(16, 32, seed=0)
    check = VendorCheck(file, "library 1", compare)
    for rows in (8, 9, 8):
        assert check.has_our_bits(whole(rows, 32, seed=1), weight, None, torch.bfloat16) == (rows != 9)
    assert calls == [8, 9]
    again = VendorCheck(file, "library 1", compare)
    assert not again.has_our_bits(whole(9, 32, seed=1), weight, None, torch.bfloat16)
    assert calls == [8, 9]
    again.has_our_bits(whole(9, 32, seed=1), weight, None, torch.float32)
    again.has_our_bits(whole(9, 32, seed=1), weight, whole(16, seed=0), torch.bfloat16)
    other = VendorCheck(file, "library 2", compare)
    other.has_our_bits(whole(8, 32, seed=1), weight, None, torch.bfloat16)
    assert calls == [8, 9, 9, 9, 8]
    assert set(json.loads(file.read_text())) == {"library 1", "library 2"}
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_damaged_file_is_replaced(tmp_path: Path, content: str) -> None:
    file = tmp_path / "products.json"
    file.write_text(content)
    check = VendorCheck(file, "library 1", lambda *_: True)
    assert check.has_our_bits(whole(8, 32, seed=1), dense(16, 32, seed=0), None, torch.bfloat16)
    assert list(json.loads(file.read_text())) == ["library 1"]


def test_no_place_to_write_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    calls = list[int]()
    check = VendorCheck(tmp_path / "file" / "products.json", "library 1", lambda x, *_: not calls.append(len(x)))
    for _ in range(2):
        assert check.has_our_bits(whole(8, 32, seed=1), dense(16, 32, seed=0), None, torch.bfloat16)
    assert calls == [8]


@pytest.mark.parametrize("rows", [3, 70, 513])
@pytest.mark.parametrize("has_out", [False, True])
def test_any_number_of_rows(rows: int, has_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """513 rows are padded."""
    monkeypatch.setattr(products, "_many", recorded(products._many, counts := []))
    x, weight = whole(rows, 32, seed=1), dense(24, 32, seed=0)
    out = torch.empty(rows, 24, device=DEVICE) if has_out else None
    ours = product(x, weight, out_dtype=torch.float32, out=out)
    assert out is None or ours is out
    assert torch.equal(ours, x.float() @ weight.values.float().t())
    assert counts == {3: [], 70: [70], 513: [576]}[rows]


def recorded(function: Callable[..., Tensor], counts: list[int]) -> Callable[..., Tensor]:
    def call(x: Tensor, *arguments: object) -> Tensor:
        counts.append(len(x))
        return function(x, *arguments)

    return call


def test_measured_tiles_of_dense_weights_have_one_split() -> None:
    found = json.loads(MEASURED.read_text())
    dense_tiles = [Tile(*values) for key, values in found.items() if "bytes 2" in key]
    assert dense_tiles
    assert {tile.splits for tile in dense_tiles} == {1}

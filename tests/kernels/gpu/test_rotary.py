import pytest
import torch
from torch import Tensor

from paceline.kernels.gpu.attention.rotary import HeadNorms, rotate_and_store
from paceline.kernels.rms_norm import norm_heads_reference
from paceline.kernels.rotary import apply_rotary_and_store_reference
from tests.kernels.cases import generator, make_layout
from tests.kernels.gpu.cases import DEVICE, on_device

BLOCKS, POSITIONS = 20, 200


def tables(width: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(POSITIONS, width // 2, generator=generator(0)) * 6
    angles[0] = 0.0
    return angles.cos(), angles.sin()


def check(
    contexts: list[int],
    rows: list[int],
    heads: int,
    kv_heads: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    padding: int = 0,
    positions: Tensor | None = None,
    norm_dtype: torch.dtype | None = None,
) -> None:
    layout = make_layout(contexts, rows, BLOCKS)
    total = sum(rows)
    qkv = torch.randn(total + padding, (heads + 2 * kv_heads) * width, generator=generator(1)).to(dtype)
    if positions is None:
        positions = torch.randint(0, POSITIONS, (total + padding,), generator=generator(2))
    if cache_dtype is not None:  # values that both roundings keep, rotated by angle 0: rounding modes differ by device
        qkv, positions = qkv.to(cache_dtype).to(dtype), torch.zeros_like(positions)
    cos, sin = tables(width)
    shape = (BLOCKS, 16, kv_heads, width)
    keys, values = (torch.full(shape, torch.nan, dtype=dtype).to(cache_dtype or dtype) for _ in range(2))
    given = [tensor.clone() for tensor in (qkv, positions, cos, sin, keys, values)]
    norms = None
    if norm_dtype is not None:
        q_weight, k_weight = (1 + torch.rand(2, width, generator=generator(3))).to(norm_dtype)
        norm_heads_reference(qkv[:total], q_weight, k_weight, heads, kv_heads, 1e-2)
        norms = HeadNorms(*on_device(q_weight, k_weight), 1e-2)
    expected = apply_rotary_and_store_reference(
        qkv[:total], cos[positions[:total]], sin[positions[:total]], keys, values, layout.slots, heads, kv_heads
    )
    tensors = on_device(*given, layout.starts, layout.context_lens, layout.block_tables)
    query = rotate_and_store(*tensors, norms=norms)
    assert query.shape == (total + padding, heads, width)
    assert query.data_ptr() == tensors[0].data_ptr()
    tolerance = {
        torch.float32: 1e-6 if norm_dtype is None else 4e-6,
        torch.bfloat16: 8e-3 if norm_dtype is None else 2e-2,
        torch.float16: 1e-3,
    }[dtype]
    close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(query[:total].cpu(), expected, **close)
    assert torch.equal(query[total:].cpu(), given[0].unflatten(1, (-1, width))[total:, :heads])
    for mine, theirs in ((tensors[4], keys), (tensors[5], values)):
        torch.testing.assert_close(mine.cpu().float(), theirs.float(), **close)
    assert not keys.float().isnan().all()


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(9, 3, 64), (32, 8, 128), (2, 1, 80), (5, 5, 16)])
def test_a_ragged_batch(heads: int, kv_heads: int, width: int) -> None:
    check([37, 0, 15], [2, 3, 1], heads, kv_heads, width)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    check([14], [5], 4, 2, 64, dtype)


@pytest.mark.parametrize(
    ("dtype", "norm_dtype", "width"),
    [
        (torch.float32, torch.float32, 64),
        (torch.float32, torch.float32, 80),
        (torch.bfloat16, torch.bfloat16, 64),
        (torch.bfloat16, torch.float32, 32),
    ],
)
def test_norms_of_heads(dtype: torch.dtype, norm_dtype: torch.dtype, width: int) -> None:
    check([14, 0], [2, 1], 5, 2, width, dtype, norm_dtype=norm_dtype)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_caches(cache_dtype: torch.dtype) -> None:
    check([30, 3], [3, 1], 4, 2, 64, torch.bfloat16, cache_dtype)


def test_sequences_without_rows_and_rows_without_a_sequence() -> None:
    check([20, 5, 40, 0], [1, 0, 2, 0], 4, 2, 32, padding=3)


def test_tree_siblings_share_a_position_but_not_a_slot() -> None:
    check([30], [4], 2, 1, 32, positions=torch.tensor([30, 31, 31, 32]))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter rounds as torch does, without saturating")
def test_float8_rounds_to_the_nearest_and_saturates() -> None:
    layout = make_layout([0], [1], BLOCKS)
    qkv = torch.randn(1, 4 * 64, generator=generator(3)) * 8
    qkv[0, -64] = 1e4
    cos, sin = tables(64)
    caches = [torch.zeros(BLOCKS, 16, 1, 64).to(torch.float8_e4m3fn) for _ in range(2)]
    tensors = on_device(
        qkv,
        torch.zeros(1, dtype=torch.int64),
        cos,
        sin,
        *caches,
        layout.starts,
        layout.context_lens,
        layout.block_tables,
    )
    rotate_and_store(*tensors)
    stored = tensors[5].cpu().view(-1, 64)[layout.slots[0]].float()
    expected = qkv[0, -64:].clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(stored, expected)

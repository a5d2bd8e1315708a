"""The kernel for long prompts against the torch reference."""

from unittest import mock

import pytest
import torch
from torch import Tensor

from paceline.kernels.attention import paged_attention_reference
from paceline.kernels.formats.layout import PIECE, LongPrompt
from paceline.kernels.gpu.attention import prompts as kernel
from paceline.kernels.gpu.attention.pieces import attend_piece, uses_pieces
from paceline.kernels.gpu.attention.prompts import attend_long_prompt, supports_prompts
from tests.kernels.cases import generator, make_cache, make_layout
from tests.kernels.gpu.cases import DEVICE, on_device

BLOCKS, SCALE = 60, 0.125
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize(
    ("contexts", "rows"),
    [([0, 5], [200, 3]), ([130, 0], [256, 1]), ([7, 300], [2, 130]), ([0, 64], [1, 129])],
    ids=["no context", "whole tiles", "second sequence", "one row more than a tile"],
)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 64), (4, 1, 128)])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_equals_the_reference_and_writes_no_other_row(
    contexts: list[int], rows: list[int], heads: int, kv_heads: int, width: int, dtype: torch.dtype
) -> None:
    layout = make_layout(contexts, rows, BLOCKS)
    keys, values = (cache.to(dtype) for cache in make_cache(BLOCKS, kv_heads, width))
    q = torch.randn(sum(rows), heads, width, generator=generator(2)).to(dtype)
    expected = paged_attention_reference(q, keys, values, layout, SCALE)
    longest = rows.index(max(rows))
    first = sum(rows[:longest])
    prompt = LongPrompt(longest, first, rows[longest], contexts[longest])
    out = torch.full((sum(rows), heads * width), torch.nan, dtype=dtype, device=DEVICE)
    query, key_cache, value_cache, tables = on_device(q, keys, values, layout.block_tables)
    attend_long_prompt(query, key_cache, value_cache, tables, prompt, SCALE, out)
    end = first + prompt.num_rows
    torch.testing.assert_close(out[first:end].cpu(), expected[first:end], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert out[:first].isnan().all()
    assert out[end:].isnan().all()


def reference_piece(q: Tensor, keys: Tensor, values: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    """As `attend_piece`."""
    group = q.shape[1] // keys.shape[1]
    k, v = (part.float().repeat_interleave(group, 1) for part in (keys, values))
    scores = scale * torch.einsum("qhd,khd->hqk", q.float(), k)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], device=q.device).triu(1).bool(), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(2), v).to(q.dtype), scores.logsumexp(2)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("context", "rows", "pieces"),
    [(0, 100, [True]), (128, 128, [True, False]), (256, 90, [True, False, False]), (144, 100, [False])],
)
def test_whole_pieces_are_computed_by_the_library(
    context: int, rows: int, pieces: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first from the keys of the chunk itself, if the context is whole pieces."""
    called = list[bool]()

    def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
        assert len(q) == len(keys) == len(values) == 128
        called.append(is_causal)
        return reference_piece(q, keys, values, scale, is_causal)

    for name, value in (("PIECE", 128), ("uses_pieces", lambda *_: True), ("attend_piece", attend)):
        monkeypatch.setattr(kernel, name, value)
    monkeypatch.setattr(kernel, "_KEYS", 64)
    layout = make_layout([3, context], [2, rows], BLOCKS)
    keys, values = (cache.half() for cache in make_cache(BLOCKS, 2, 64))
    q = torch.randn(2 + rows, 4, 64, generator=generator(2)).half()
    expected = paged_attention_reference(q, keys, values, layout, SCALE)
    out = torch.full((2 + rows, 4 * 64), torch.nan, dtype=torch.half, device=DEVICE)
    query, key_cache, value_cache, tables = on_device(q, keys, values, layout.block_tables)
    attend_long_prompt(query, key_cache, value_cache, tables, LongPrompt(1, 2, rows, context), SCALE, out)
    torch.testing.assert_close(out[2:].cpu(), expected[2:], rtol=2e-3, atol=2e-3)
    assert out[:2].isnan().all()
    assert called == pieces


@pytest.mark.parametrize(
    ("rows", "context", "expected"),
    [
        (PIECE, 0, True),
        (7168, 0, True),
        (7167, 0, False),
        (PIECE + 1, 0, False),
        (8000, 100, False),
        (8000, PIECE, True),
    ],
)
def test_chunks_that_have_pieces(rows: int, context: int, expected: bool) -> None:
    assert uses_pieces(rows, context, torch.device("meta")) is expected
    assert not uses_pieces(rows, context, torch.device("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs cuDNN")
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 1, 128), (3, 1, 64)])
def test_the_library_computes_a_piece(heads: int, kv_heads: int, width: int, is_causal: bool) -> None:
    q = torch.randn(PIECE, heads, width, dtype=torch.bfloat16, device=DEVICE)
    keys, values = torch.randn(2, PIECE, kv_heads, width, dtype=torch.bfloat16, device=DEVICE)
    out, sums = attend_piece(q, keys, values, SCALE, is_causal)
    expected, expected_sums = reference_piece(q, keys, values, SCALE, is_causal)
    torch.testing.assert_close(out, expected, rtol=1.6e-2, atol=1.6e-2)
    torch.testing.assert_close(sums, expected_sums, rtol=1e-3, atol=1e-3)


def test_a_query_may_be_a_view_of_the_product_of_queries_keys_and_values() -> None:
    layout = make_layout([3], [140], BLOCKS)
    keys, values = (cache.half() for cache in make_cache(BLOCKS, 1, 64))
    q = torch.randn(140, 4, 64, generator=generator(2)).half()[:, :2]
    expected = paged_attention_reference(q, keys, values, layout, SCALE)
    out = torch.empty(140, 128, dtype=torch.half, device=DEVICE)
    query, key_cache, value_cache, tables = on_device(q, keys, values, layout.block_tables)
    attend_long_prompt(query, key_cache, value_cache, tables, LongPrompt(0, 0, 140, 3), SCALE, out)
    torch.testing.assert_close(out.cpu(), expected, rtol=2e-3, atol=2e-3)


def test_supports_half_precision_caches_of_the_same_type_on_hopper() -> None:
    cache = torch.empty(1, 16, 1, 128, dtype=torch.bfloat16)
    with mock.patch.object(kernel, "capability", return_value=90):
        assert supports_prompts(torch.bfloat16, cache)
        assert not supports_prompts(torch.float32, cache.float())
        assert not supports_prompts(torch.bfloat16, cache.to(torch.float8_e4m3fn))
        assert not supports_prompts(torch.bfloat16, cache[..., :96])
    with mock.patch.object(kernel, "capability", return_value=80):
        assert not supports_prompts(torch.bfloat16, cache)

"""The kernel for long prompts against the torch reference."""

from unittest import mock

import pytest
import torch

from paceline.kernels.attention import paged_attention_reference
from paceline.kernels.formats.layout import LongPrompt
from paceline.kernels.gpu.attention import prompts as kernel
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

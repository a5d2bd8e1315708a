"""The Triton kernel against the torch reference, which tests/kernels/test_attention.py compares with a naive loop."""

import pytest
import torch
from torch import Tensor

from paceline.kernels.attention import paged_attention_reference
from paceline.kernels.formats.layout import AttentionLayout
from paceline.kernels.gpu.attention import plan as plans
from paceline.kernels.gpu.attention.paged import paged_attention
from paceline.kernels.gpu.attention.plan import AttentionPlan, AttentionScratch, attention_plan, ragged_plan
from tests.kernels.cases import generator, make_cache, make_layout
from tests.kernels.gpu.cases import DEVICE, on_device
from tests.kernels.test_attention import PARENTS, masks

BLOCKS, SCALE, LONGEST = 40, 0.125, 640
TREE = len(PARENTS)


def check(
    contexts: list[int],
    rows: list[int],
    heads: int = 6,
    kv_heads: int = 2,
    width: int = 64,
    max_rows: int | None = None,
    splits: int = 1,
    ancestors: Tensor | None = None,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    plan: AttentionPlan | None = None,
    padding: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compare with the reference and return the output. Rows that belong to no sequence must not be written."""
    layout = make_layout(contexts, rows, BLOCKS, ancestors)
    keys, values = (cache.to(cache_dtype or dtype) for cache in make_cache(BLOCKS, kv_heads, width))
    q = torch.randn(sum(rows), heads, width, generator=generator(2)).to(dtype)
    expected = paged_attention_reference(q, keys, values, layout, SCALE, window, sinks)
    total = sum(rows) + padding
    if plan is None:
        plan = attention_plan(
            total,
            len(rows),
            max_rows or max(rows),
            heads,
            kv_heads,
            width,
            LONGEST,
            DEVICE,
            splits,
            is_tree=ancestors is not None,
        )
    poison(layout, keys, values)
    out = torch.full((total, heads * width), torch.nan, dtype=dtype, device=DEVICE)
    query = torch.cat((q, torch.full((padding, heads, width), torch.nan, dtype=dtype)))
    tensors = on_device(query, keys, values, layout.starts, layout.context_lens, layout.block_tables)
    marks = None if ancestors is None else on_device(ancestors)[0]
    own_sinks = None if sinks is None else on_device(sinks)[0]
    assert paged_attention(*tensors, plan, SCALE, marks, window, out=out, sinks=own_sinks) is out
    out = out.cpu()
    assert out[sum(rows) :].isnan().all()
    tolerance = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(out[: sum(rows)], expected, rtol=tolerance, atol=tolerance)
    assert not plan.counters.any()
    return out


def poison(layout: AttentionLayout, keys: Tensor, values: Tensor) -> None:
    """Write NaN to all slots without stored tokens: unused blocks, and the end of each last block."""
    held = torch.zeros(keys.shape[:2], dtype=torch.bool)
    for s, context in enumerate(layout.context_lens.tolist()):
        length = context + int(layout.starts[s + 1] - layout.starts[s])
        for index in range(length):
            held[layout.block_tables[s, index // 16], index % 16] = True
    for cache in (keys, values):
        if cache.itemsize == 1:
            cache.view(torch.uint8)[~held] = 0x7F  # NaN in both float8 types
        else:
            cache[~held] = torch.nan


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(9, 3, 64), (32, 8, 128), (3, 3, 32), (5, 1, 128), (4, 1, 80)]
)
def test_decode_of_a_ragged_batch(heads: int, kv_heads: int, width: int, splits: int) -> None:
    check([70, 0, 129, 15], [1, 1, 1, 1], heads, kv_heads, width, splits=splits)


@pytest.mark.parametrize("splits", [1, 2, 5, 16])
def test_a_single_sequence_over_several_splits(splits: int) -> None:
    """With more splits than chunks of keys, some programs have no work."""
    check([300], [8], 9, 3, 64, splits=splits)


@pytest.mark.parametrize("window", [None, 1, 5, 24, 70])
@pytest.mark.parametrize("splits", [1, 3])
def test_verification_with_windows(window: int | None, splits: int) -> None:
    check([37, 0, 150, 16], [8, 3, 1, 5], window=window, splits=splits)


@pytest.mark.parametrize("window", [None, 1, 5, 24, 70])
@pytest.mark.parametrize("splits", [1, 3])
def test_trees_and_chains_in_one_batch(window: int | None, splits: int) -> None:
    ancestors = torch.tensor([*masks(PARENTS), -1, -1, -1, -1, *masks(PARENTS)])
    check([90, 0, 16, 0], [TREE, 3, 1, TREE], ancestors=ancestors, window=window, splits=splits)


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("splits", [1, 3])
def test_sinks_of_each_head(window: int | None, splits: int) -> None:
    sinks = torch.randn(6, generator=generator(5)) * 3
    ancestors = torch.tensor([*masks(PARENTS), -1, -1, -1, -1])
    check([90, 0, 150], [TREE, 3, 1], ancestors=ancestors, window=window, splits=splits, sinks=sinks)


@pytest.mark.parametrize("sink", [-1e4, 1e4])
def test_sinks_far_from_the_scores_of_keys(sink: float) -> None:
    out = check([70], [2], splits=2, sinks=torch.full((6,), sink))
    assert (out.abs().max() > 1e-3) == (sink < 0)


@pytest.mark.parametrize("window", [None, 7])
def test_a_tree_of_64_rows_uses_the_sign_bit(window: int | None) -> None:
    parents = (-1, *((i - 1) // 2 for i in range(1, 63)), 62)
    ancestors = torch.tensor([mask - 2**64 if mask >= 2**63 else mask for mask in masks(parents)])
    check([21], [64], 3, 3, 32, ancestors=ancestors, window=window)


@pytest.mark.parametrize("tree", [False, True])
def test_contexts_that_end_just_before_and_after_a_chunk_of_keys(tree: bool) -> None:
    """The boundary between keys that all rows attend to and keys that only some attend to."""
    ancestors = torch.tensor(masks((-1, 0, 0, 1, 1, 2, 2, 3)) * 3) if tree else None
    check([62, 63, 64], [8, 8, 8], 2, 1, 32, ancestors=ancestors)


@pytest.mark.parametrize("window", [None, 40])
def test_prefill_in_row_tiles_with_decode_in_one_batch(window: int | None) -> None:
    check([0, 33, 100], [150, 1, 20], heads=4, kv_heads=1, window=window, splits=2)


def test_rows_of_a_long_masked_chain_attend_to_all_earlier_rows() -> None:
    check([5], [100], ancestors=torch.full((100,), -1))


def test_more_rows_than_planned() -> None:
    check([40, 3], [30, 11], max_rows=1, splits=2)


@pytest.mark.parametrize("rows", [[1, 0, 2, 0], [0, 0, 3], [0]])
def test_sequences_without_rows_and_rows_without_a_sequence(rows: list[int]) -> None:
    """The padding of a captured pass."""
    check([20] * len(rows), rows, max_rows=2, padding=3, splits=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("splits", [1, 4])
def test_half_precision(dtype: torch.dtype, splits: int) -> None:
    check([150, 31], [4, 1], 8, 2, 128, splits=splits, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_caches(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    check([90, 31], [4, 1], splits=2, dtype=dtype, cache_dtype=cache_dtype)


def test_a_plan_is_reusable_as_contexts_grow() -> None:
    plan = attention_plan(6, 2, 3, 6, 2, 64, LONGEST, DEVICE, num_splits=4)
    first = [check([context, 3], [3, 3], plan=plan) for context in (0, 64, 250)]
    again = [check([context, 3], [3, 3], plan=plan) for context in (0, 64, 250)]
    assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("rows", [1, 3, 7])  # 7: two tiles of a sequence
def test_sequences_of_as_many_rows_need_no_search(rows: int, splits: int) -> None:
    contexts = [130, 0, 63]
    plan = attention_plan(3 * rows, 3, rows, 6, 2, 64, LONGEST, DEVICE, splits, is_uniform=True)
    searching = attention_plan(3 * rows, 3, rows, 6, 2, 64, LONGEST, DEVICE, splits)
    assert plan.num_tiles <= searching.num_tiles
    both = [check(contexts, [rows] * 3, plan=one) for one in (plan, searching)]
    assert torch.equal(*both)


def test_trees_of_as_many_nodes_need_no_search() -> None:
    plan = attention_plan(2 * TREE, 2, TREE, 6, 2, 64, LONGEST, DEVICE, num_splits=2, is_uniform=True, is_tree=True)
    check([40, 70], [TREE] * 2, ancestors=torch.tensor(2 * masks(PARENTS)), plan=plan)


def test_plans_can_share_scratch_that_grows() -> None:
    scratch = AttentionScratch(DEVICE)
    cases = [([250, 3], 2), ([250, 3, 130], 4), ([250], 4)]
    plans = [
        attention_plan(3 * len(contexts), len(contexts), 3, 6, 2, 64, LONGEST, DEVICE, splits, scratch)
        for contexts, splits in cases
    ]
    assert plans[1].states.data_ptr() == plans[2].states.data_ptr() != plans[0].states.data_ptr()
    for (contexts, _), plan in 2 * list(zip(cases, plans, strict=True)):
        check(contexts, [3] * len(contexts), plan=plan)


def test_queries_may_be_a_view_of_the_joint_projection() -> None:
    layout = make_layout([20], [3], BLOCKS)
    keys, values = make_cache(BLOCKS, 2, 64)
    joint = torch.randn(3, (6 + 4) * 64, generator=generator(3))
    q = joint.unflatten(1, (-1, 64))[:, :6]
    expected = paged_attention_reference(q, keys, values, layout, SCALE)
    tensors = on_device(keys, values, layout.starts, layout.context_lens, layout.block_tables)
    view = on_device(joint)[0].unflatten(1, (-1, 64))[:, :6]
    out = paged_attention(view, *tensors, attention_plan(3, 1, 3, 6, 2, 64, LONGEST, DEVICE), SCALE)
    torch.testing.assert_close(out.cpu(), expected, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("context", "rows"), [(60, 8), (250, 6)])
@pytest.mark.parametrize(("heads", "kv_heads", "has_sinks"), [(16, 2, True), (9, 3, False)])
def test_a_row_of_a_chain_has_the_bits_of_the_row_decoded_alone(
    heads: int, kv_heads: int, has_sinks: bool, context: int, rows: int, window: int | None, dtype: torch.dtype
) -> None:
    """Chunks and parts of the context begin at fixed indices, and no sum depends on other rows."""
    layout = make_layout([context], [rows], BLOCKS)
    caches = on_device(*(cache.to(dtype) for cache in make_cache(BLOCKS, kv_heads, 64)))
    q = torch.randn(rows, heads, 64, generator=generator(2)).to(DEVICE, dtype)
    sinks = torch.randn(heads, generator=generator(5)).to(DEVICE, dtype) if has_sinks else None

    def attend(first: int, count: int) -> Tensor:
        plan = attention_plan(count, 1, count, heads, kv_heads, 64, LONGEST, DEVICE, num_splits=4)
        place = on_device(
            torch.tensor([0, count], dtype=torch.int32), torch.tensor([context + first]).int(), layout.block_tables
        )
        return paged_attention(q[first : first + count], *caches, *place, plan, SCALE, window=window, sinks=sinks)

    together = attend(0, rows)
    for i in range(rows):
        assert torch.equal(attend(i, 1)[0], together[i])


@pytest.mark.parametrize("rows", [2, 8, 16])
def test_up_to_16_rows_are_split_as_one_row_is(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_multiprocessors", lambda device: 132)  # on a CPU contexts are not split
    alone, together = (attention_plan(count, 1, count, 32, 8, 128, LONGEST, DEVICE) for count in (1, rows))
    assert together.num_splits == alone.num_splits > 1


@pytest.mark.parametrize("padding", [0, 7])
def test_prompts_beside_sequences_that_decode(padding: int) -> None:
    """Sequences of few rows have tiles of their own, and every row is computed once."""
    rows, contexts = [1, 40, 1, 3, 6, 2, 1], [5, 0, 37, 16, 20, 0, 3]
    plan = ragged_plan(sum(rows) + padding, len(rows), 6, 2, 64, LONGEST, DEVICE)
    assert plan.few is not None
    assert plan.few.tile < plan.tile
    assert plan.few.most_rows + 1 == plan.least_rows
    check(contexts, rows, plan=plan, padding=padding)


@pytest.mark.parametrize(("rows", "splits"), [([1, 1, 1, 40, 3], 8), ([3, 3, 40, 9, 4], 16), ([1, 40], 32)])
def test_sequences_that_decode_before_prompts_are_split_as_without_prompts(
    rows: list[int], splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.kernels.gpu.attention.plan._multiprocessors", lambda device: 8)
    each = rows[0]
    plan = ragged_plan(sum(rows), len(rows), 6, 2, 64, LONGEST, DEVICE, few_rows=each, num_decoding=rows.count(each))
    assert plan.few is not None
    assert (plan.least_rows, plan.few.most_rows, plan.few.num_splits) == (each + 1, each, splits)
    check([150, 300, 70, 0, 16][: len(rows)], rows, plan=plan)


def test_a_single_prompt_needs_no_second_launch() -> None:
    assert ragged_plan(40, 1, 6, 2, 64, LONGEST, DEVICE).few is None

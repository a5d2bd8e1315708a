import pytest
import torch
from torch import Tensor

from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.attention import paged_attention, paged_attention_reference
from paceline.kernels.cpu import native
from paceline.kernels.formats.layout import AttentionLayout
from tests.kernels.cases import generator, make_cache, make_layout, needs_native

HEADS, KV_HEADS, WIDTH, BLOCKS, SCALE = 6, 2, 64, 40, 0.125

#        0
#      1   2
#     3 4   5
#     6     7 8   and a chain from 8 to 24: longer than a vector and than a block of rows
PARENTS = (-1, 0, 0, 1, 1, 2, 3, 5, 5, *range(8, 24))


def masks(parents: tuple[int, ...]) -> list[int]:
    out: list[int] = []
    for i, parent in enumerate(parents):
        out.append(1 << i | (out[parent] if parent >= 0 else 0))
    return out


def naive(q: Tensor, keys: Tensor, values: Tensor, layout: AttentionLayout, window: int | None) -> Tensor:
    """Reference in double precision, one row and one head at a time."""
    heads, kv_heads, width = q.shape[1], keys.shape[2], q.shape[2]
    out = torch.zeros(len(q), heads, width, dtype=torch.float64)
    for s, context in enumerate(layout.context_lens.tolist()):
        first, end = layout.starts[s : s + 2].tolist()
        for row in range(first, end):
            mask = -1 if layout.ancestors is None else int(layout.ancestors[row])
            own = [i for i in range(row - first + 1) if mask == -1 or mask >> i & 1]
            seen = [*range(context), *(context + i for i in own)]
            seen = seen if window is None else seen[-window:]
            slots = [int(layout.block_tables[s, i // BLOCK_SIZE]) * BLOCK_SIZE + i % BLOCK_SIZE for i in seen]
            for h in range(heads):
                k = keys.view(-1, kv_heads, width)[slots, h * kv_heads // heads].double()
                v = values.view(-1, kv_heads, width)[slots, h * kv_heads // heads].double()
                out[row, h] = (k @ q[row, h].double() * SCALE).softmax(0) @ v
    return out.flatten(1)


@pytest.mark.parametrize("window", [None, 1, 5, 24])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(6, 2, 64), (3, 3, 32), (5, 1, 128), (8, 1, 80), (2, 1, 24)])
def test_equals_a_naive_loop(window: int | None, tree: bool, heads: int, kv_heads: int, width: int) -> None:
    contexts, rows = [37, 0, 16], [len(PARENTS), 3, 1]
    ancestors = torch.tensor([*masks(PARENTS), -1, -1, -1, -1]) if tree else None
    layout = make_layout(contexts, rows, BLOCKS, ancestors)
    keys, values = make_cache(BLOCKS, kv_heads, width)
    q = torch.randn(sum(rows), heads, width, generator=generator(2))
    expected = naive(q, keys, values, layout, window)
    for attend in (paged_attention, paged_attention_reference):
        out = attend(q, keys, values, layout, SCALE, window)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-6)


@needs_native
def test_rows_of_a_long_masked_chain_attend_to_all_earlier_rows() -> None:
    layout = make_layout([5], [100], BLOCKS, torch.full((100,), -1))
    keys, values = make_cache(BLOCKS, KV_HEADS, WIDTH)
    q = torch.randn(100, HEADS, WIDTH, generator=generator(3))
    out = paged_attention(q, keys, values, layout, SCALE)
    torch.testing.assert_close(out, paged_attention_reference(q, keys, values, layout, SCALE), rtol=1e-5, atol=2e-6)


@needs_native
@pytest.mark.parametrize("window", [None, 21])
def test_the_bits_of_a_row_do_not_depend_on_other_rows(window: int | None) -> None:
    keys, values = make_cache(BLOCKS, KV_HEADS, WIDTH)
    q = torch.randn(90, HEADS, WIDTH, generator=generator(4))
    whole = make_layout([0], [90], BLOCKS)
    together = paged_attention(q, keys, values, whole, SCALE, window)
    for threads in (1, 2, 3):
        native.set_num_threads(threads)
        for chunk in (1, 7, 16, 64):
            parts = []
            for first in range(0, 90, chunk):
                rows = q[first : first + chunk]
                lens = torch.tensor([first], dtype=torch.int32)
                starts = torch.tensor([0, len(rows)], dtype=torch.int32)
                part = AttentionLayout(whole.slots[first : first + chunk], starts, lens, whole.block_tables)
                parts.append(paged_attention(rows, keys, values, part, SCALE, window))
            assert torch.equal(torch.cat(parts), together), (threads, chunk)
    two = make_layout([0, 33], [90, 2], BLOCKS)
    tables = two.block_tables.clone()
    tables[0] = whole.block_tables[0]
    both = AttentionLayout(two.slots, two.starts, two.context_lens, tables)
    assert torch.equal(paged_attention(torch.cat((q, q[:2])), keys, values, both, SCALE, window)[:90], together)


@needs_native
@pytest.mark.parametrize("window", [None, 3, 21])
@pytest.mark.parametrize("context", [0, 13, 30])
def test_a_tree_node_has_the_bits_of_the_same_path_in_a_chain(context: int, window: int | None) -> None:
    layout = make_layout([context], [len(PARENTS)], BLOCKS, torch.tensor(masks(PARENTS)))
    keys, values = make_cache(BLOCKS, KV_HEADS, WIDTH)
    q = torch.randn(len(PARENTS), HEADS, WIDTH, generator=generator(5))
    tree = paged_attention(q, keys, values, layout, SCALE, window)
    for node, mask in enumerate(masks(PARENTS)):
        path = [i for i in range(node + 1) if mask >> i & 1]
        moved = keys.clone(), values.clone()
        for cache, original in zip(moved, (keys, values), strict=True):
            flat, source = cache.view(-1, KV_HEADS, WIDTH), original.view(-1, KV_HEADS, WIDTH)
            flat[layout.slots[: len(path)]] = source[layout.slots[path]]
        starts = torch.tensor([0, len(path)], dtype=torch.int32)
        chain = AttentionLayout(layout.slots[: len(path)], starts, layout.context_lens, layout.block_tables)
        assert torch.equal(paged_attention(q[path], *moved, chain, SCALE, window)[-1], tree[node])

"""A row has the bits of plain decoding, whatever is computed with it. Planted faults change them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.gpu.attention.order_forms import (
    HEADS,
    KV_HEADS,
    PAGE,
    SCALE,
    WIDTH,
    Rows,
    planted,
    together,
)
from tests.kernels.gpu.cases import DEVICE
from tests.kernels.test_attention import PARENTS, masks

KINDS = {
    "plain": {},
    "window": {"window": 300},
    "short window": {"window": 20},
    "sinks": {"has_sinks": True},
    "float8": {"cache_dtype": torch.float8_e4m3fn},
}
TREE = masks(PARENTS)


def differing(a: Tensor, b: Tensor) -> int:
    """Values whose bits differ."""
    return int((a.contiguous().view(torch.int32) != b.contiguous().view(torch.int32)).sum())


def path_of(mask: int) -> list[int]:
    return [row for row in range(64) if mask >> row & 1]


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(("length", "count"), [(40, 30), (290, 70), (2060, 14)])
def test_rows_in_any_pass(kind: str, length: int, count: int) -> None:
    rows = Rows(length, count, **KINDS[kind])
    whole = rows.pass_over(tile=128)
    some = range(0, count, 6)
    for splits in (1, 8):
        assert not differing(rows.one_by_one(some, splits), whole[some])
    for tile, splits in ((16, 1), (32, 2), (64, 4), (128, 16)):
        assert not differing(rows.pass_over(tile=tile, splits=splits), whole), (tile, splits)
    assert not differing(rows.in_pieces(13, splits=4), whole)


@pytest.mark.parametrize("kind", ["plain", "window"])
def test_spans_of_several_groups(kind: str) -> None:
    rows = Rows(4090, 3, **KINDS[kind])
    whole = rows.pass_over()
    for splits in (2, 4, 32):
        assert not differing(rows.pass_over(splits=splits), whole)


def test_long_prompts() -> None:
    rows = Rows(2300, 150)
    assert not differing(rows.as_long_prompt(), rows.pass_over())


@pytest.mark.parametrize("splits", [1, 4])
def test_sequences_beside_others(splits: int) -> None:
    sequences = [Rows(*size, seed=seed) for seed, size in enumerate([(1, 1), (700, 1), (64, 1), (257, 3), (300, 20)])]
    for out, alone in zip(together(sequences, splits), sequences, strict=True):
        assert not differing(out, alone.pass_over())


def test_sequences_that_decode_beside_prompts() -> None:
    sequences = [Rows(*size, seed=seed) for seed, size in enumerate([(300, 1), (65, 1), (400, 200)])]
    for out, alone in zip(together(sequences, 1, num_decoding=2), sequences, strict=True):
        some = range(0, alone.count, 40)
        assert not differing(out[some], alone.one_by_one(some))


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("context", [0, 5, 250, 500, 2040])
def test_nodes_of_a_tree_have_the_bits_of_their_paths(kind: str, context: int) -> None:
    rows = Rows(context + len(TREE), len(TREE), **KINDS[kind])
    nodes = [0, 4, 7, 14, 24]
    expected = torch.cat([rows.path_decoded(path_of(TREE[node])) for node in nodes])
    for splits, tile in ((1, 128), (4, 16)):
        assert not differing(rows.pass_over(splits=splits, tile=tile, ancestors=TREE)[nodes], expected)


def test_a_chain_beside_trees_has_the_bits_of_decoding() -> None:
    rows = Rows(300, 10)
    assert not differing(rows.pass_over(ancestors=[-1] * 10, splits=2), rows.pass_over())


def canonical(rows: Rows, row: int) -> np.ndarray:
    """[HEADS, WIDTH] float32 of a row by the rule, one key-value head after another: chunks of 64 keys, 16 products at a time;
    parts of 256; groups of 2,048."""
    context = rows.length - rows.count + row + 1
    slots = [int(rows.table[0, i // PAGE]) * PAGE + i % PAGE for i in range(context)]
    keys, values = (part.view(-1, KV_HEADS, WIDTH)[slots].float().numpy() for part in rows.cache)
    scale = np.float32(SCALE * 1.4426950408889634)
    out = []
    for head in range(HEADS):
        query = rows.q[row, head].float().numpy()
        k, v = keys[:, head * KV_HEADS // HEADS], values[:, head * KV_HEADS // HEADS]
        groups = []
        for group in range(0, context, 2048):
            parts = []
            for part in range(group, min(group + 2048, context), 256):
                state = empty()
                for chunk in range(part, min(part + 256, context), 64):
                    end = min(chunk + 64, context)
                    state = add_chunk(state, products(k[chunk:end], query), v[chunk:end], scale)
                parts.append(state)
            groups.append(fold(parts, scale))
        _, norm, total = fold(groups, scale)
        out.append(total * (np.float32(1) / norm))
    return np.stack(out)


State = tuple[np.float32, np.float32, np.ndarray]


def empty() -> State:
    return np.float32(-1e30), np.float32(0), np.zeros(WIDTH, np.float32)


def products(a: np.ndarray, b: np.ndarray, total: np.ndarray | None = None) -> np.ndarray:
    """total + a b in float32, 16 products at a time."""
    total = np.zeros(len(a), np.float32) if total is None else total
    for i in range(0, a.shape[1], 16):
        added = a[:, i : i + 16].astype(np.float64) @ b[i : i + 16].astype(np.float64)
        total = (added + total).astype(np.float32)
    return total


def add_chunk(state: State, scores: np.ndarray, values: np.ndarray, scale: np.float32) -> State:
    top, norm, total = state
    new_top = max(top, scores.max())
    decay = np.exp2((top - new_top) * scale)
    weights = np.exp2(scores * scale + -(new_top * scale))
    weights = torch.from_numpy(weights).bfloat16().float().numpy()
    norm = products(np.ones((1, len(weights)), np.float32), weights, np.array([norm * decay]))[0]
    return new_top, norm, products(values.T, weights, total * decay)


def fold(states: Sequence[State], scale: np.float32) -> State:
    top, norm, total = empty()
    for next_top, next_norm, next_total in states:
        new_top = max(top, next_top)
        factor, next_factor = np.exp2((top - new_top) * scale), np.exp2((next_top - new_top) * scale)
        norm = norm * factor + next_norm * next_factor
        total = total * factor + next_total * next_factor
        top = new_top
    return top, norm, total


def follows_the_rule(rows: Rows) -> bool:
    out = rows.pass_over(splits=4)
    expected = torch.stack([torch.from_numpy(canonical(rows, row)).flatten() for row in range(rows.count)])
    return not differing(out, expected)


needs_interpreter = pytest.mark.skipif(DEVICE.type == "cuda", reason="exp2 of a GPU is another than numpy's")


@needs_interpreter
@pytest.mark.parametrize("length", [1, 65, 300, 2500])
def test_the_kernel_follows_the_rule(length: int) -> None:
    assert follows_the_rule(Rows(length, 1))


def equal_in_two_passes(rows: Rows) -> bool:
    some = range(0, rows.count, 5)
    return not differing(rows.pass_over(tile=128)[some], rows.one_by_one(some, splits=4))


def test_planted_parts_that_depend_on_the_context(tmp_path: Path) -> None:
    old = "(chunk % PART_KEYS == 0)"
    kernels = planted(tmp_path, "kernels", (old, "(chunk % (PART_KEYS * (1 + (span_end > 520).to(tl.int32))) == 0)"))
    assert equal_in_two_passes(Rows(530, 40))
    assert not equal_in_two_passes(Rows(530, 40, kernels=kernels))


def test_planted_row_sums_by_a_reduction(tmp_path: Path) -> None:
    """The shape of the reduction depends on the tile, as that of `tl.sum` may."""
    old = 'norm = tl.dot(weights, ones, norm, input_precision="ieee")'
    summed = (
        "PAIR: tl.constexpr = 2 if scores.shape[0] > 16 else scores.shape[1] // 2\n"
        "    pairs = tl.reshape(weights.to(tl.float32), [scores.shape[0], scores.shape[1] // PAIR, PAIR])\n"
        "    norm += tl.sum(tl.sum(pairs, 2), 1)[:, None]"
    )
    kernels = planted(tmp_path, "order", (old, summed))
    assert equal_in_two_passes(Rows(700, 11))
    assert not equal_in_two_passes(Rows(700, 11, kernels=kernels))


def test_planted_states_joined_as_they_arrive(tmp_path: Path) -> None:
    """From last to first, in place of another order that depends on time."""
    old = "state = at + (first_slot + first + i) * slot_stride"
    kernels = planted(
        tmp_path, "states", (old, "state = at + (first_slot + tl.maximum(count - 1 - first - i, 0)) * slot_stride")
    )
    assert equal_in_two_passes(Rows(1000, 11))
    assert not equal_in_two_passes(Rows(1000, 11, kernels=kernels))


def test_planted_tree_with_the_usual_mask(tmp_path: Path) -> None:
    """Keys in the order of their slots, of which a node attends to its ancestors."""

    def equals_paths(rows: Rows) -> bool:
        tree = rows.pass_over(ancestors=TREE)
        return not any(
            differing(tree[node], rows.path_decoded(path_of(TREE[node]))[0]) for node in range(0, rows.count, 3)
        )

    position = "own = node_position(context, first_row + row, tl.load(ancestors + position, mask=is_live, other=-1))"
    kernels = planted(
        tmp_path,
        "trees",
        (position, "own = context + first_row + row"),
        (
            "place <= node_position(context, first_row + node, lineage)",
            "((depth < 0) | (((lineage >> tl.maximum(depth, 0)) & 1) == 1))",
        ),
        ("nth_bit(lineage.to(tl.uint64), tl.maximum(depth, 0))", "depth"),
    )  # fmt: skip
    sizes = 250 + len(TREE), len(TREE)
    assert equals_paths(Rows(*sizes))
    assert not equals_paths(Rows(*sizes, kernels=kernels))
    torch.testing.assert_close(
        Rows(*sizes, kernels=kernels).pass_over(ancestors=TREE), Rows(*sizes).pass_over(ancestors=TREE), rtol=1e-2, atol=2e-2
    )  # fmt: skip

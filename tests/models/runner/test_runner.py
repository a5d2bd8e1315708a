"""The runner: any chunks of a text, in any blocks, give the logits of one whole pass."""

import random

import pytest
import torch
from torch import Tensor

from paceline.core.sequence import BLOCK_SIZE
from paceline.models.runner.runner import ModelRunner, Span
from paceline.speculation.drafts.drafts import depths
from paceline.speculation.verification.tree import ancestors
from tests.fakes import TINY, tiny_model

MODEL = tiny_model()
TEXT = [i * 7 % TINY.vocab_size for i in range(53)]


def runner(num_blocks: int = 16) -> ModelRunner:
    return ModelRunner(MODEL, num_blocks)


def blocks(count: int = 4, seed: int = 0) -> list[int]:
    return random.Random(seed).sample(range(16), count)


def whole(ids: list[int]) -> Tensor:
    """[len(ids), V] from a single pass over fresh, contiguous blocks."""
    logits = runner().forward([Span(range(8), 0, ids, num_logits=len(ids))]).logits
    assert logits is not None
    return logits


def close(ours: Tensor | None, theirs: Tensor) -> None:
    assert ours is not None
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cuts", [(53,), (1, 52), (16, 16, 21), (15, 2, 30, 6), (1,) * 53])
def test_chunks_give_the_logits_of_one_pass(cuts: tuple[int, ...]) -> None:
    part, table, start, rows = runner(), blocks(), 0, []
    for count in cuts:
        output = part.forward([Span(table, start, TEXT[start : start + count], num_logits=count)])
        rows.append(output.logits)
        start += count
    close(torch.cat(rows), whole(TEXT))


def test_sequences_of_different_lengths_share_a_pass() -> None:
    part = runner()
    tables = [[9, 3, 12], [0, 5], [7]]
    texts = [TEXT[:40], TEXT[10:30], TEXT[3:5]]
    part.forward([Span(tables[0], 0, texts[0][:30], 0), Span(tables[1], 0, texts[1][:19], 0)])
    logits = part.forward(
        [Span(tables[0], 30, texts[0][30:], 3), Span(tables[1], 19, texts[1][19:], 1), Span(tables[2], 0, texts[2], 2)]
    ).logits
    close(logits, torch.cat([whole(texts[0])[-3:], whole(texts[1])[-1:], whole(texts[2])]))


def test_only_requested_logits_are_returned() -> None:
    part = runner()
    assert part.forward([Span([0], 0, TEXT[:4], 0)]).logits is None
    logits = part.forward([Span([1], 0, TEXT[:4], 0), Span([2], 0, TEXT[:5], 1)]).logits
    close(logits, whole(TEXT[:5])[-1:])


def test_more_blocks_than_needed_change_nothing() -> None:
    part = runner()
    logits = part.forward([Span([8, 1, 14, 2, 11, 6], 0, TEXT[:20], 1), Span([15], 0, TEXT[:3], 1)]).logits
    close(logits, torch.stack([whole(TEXT[:20])[-1], whole(TEXT[:3])[-1]]))


PARENTS = [-1, 0, 0, 2, -1, 3]


def tree_span(table: list[int], tokens: list[int], start: int) -> Span:
    positions = [start, *(start + depth for depth in depths(PARENTS))]
    return Span(table, start, [TEXT[start], *tokens], 1 + len(tokens), positions, ancestors(PARENTS))


def path_to(node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = PARENTS[node]
    return path


def test_each_node_of_a_tree_attends_to_its_own_path() -> None:
    part, table, tokens = runner(), blocks(), [3, 8, 9, 1, 4, 6]
    part.forward([Span(table, 0, TEXT[:14], 0)])
    logits = part.forward([tree_span(table, tokens, 14), Span([b for b in range(16) if b not in table], 0, [5, 6], 1)])
    assert logits.logits is not None
    close(logits.logits[0], whole(TEXT[:15])[-1])
    for node in range(len(tokens)):
        close(logits.logits[1 + node], whole([*TEXT[:15], *(tokens[i] for i in path_to(node))])[-1])
    close(logits.logits[-1], whole([5, 6])[-1])  # a chain in the same pass


def test_an_accepted_path_becomes_contiguous() -> None:
    part, table, tokens = runner(), blocks(), [3, 8, 9, 1, 4, 6]
    part.forward([Span(table, 0, TEXT[:14], 0)])
    part.forward([tree_span(table, tokens, 14)])
    path = path_to(5)
    assert path == [0, 2, 3, 5]
    slot = lambda index: table[index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE  # noqa: E731
    part.move([slot(15 + node) for node in path], [slot(15 + step) for step in range(4)])
    ids = [*TEXT[:15], *(tokens[i] for i in path), 7]
    close(part.forward([Span(table, 19, [7], 1)]).logits, whole(ids)[-1:])


def test_moves_read_before_they_write() -> None:
    part = runner(2)
    for layer in part.cache:
        for values in layer:
            values.copy_(torch.arange(32.0).view(2, 16, 1, 1).expand_as(values))
    part.move([1, 2, 17], [0, 1, 2])
    part.move([], [])
    for layer in part.cache:
        for values in layer:
            assert values[:, :, 0, 0].flatten()[:4].tolist() == [1.0, 2.0, 17.0, 3.0]


def test_the_cache_is_allocated_once() -> None:
    part = runner(5)
    places = [values.data_ptr() for layer in part.cache for values in layer]
    assert {tuple(values.shape) for layer in part.cache for values in layer} == {(5, BLOCK_SIZE, 2, 16)}
    part.forward([Span([4, 0], 0, TEXT[:20], 1)])
    assert [values.data_ptr() for layer in part.cache for values in layer] == places
    untouched = [values[1:4] for layer in part.cache for values in layer]
    assert all(float(values.abs().sum()) == 0.0 for values in untouched)


def test_inner_states_are_returned_on_request() -> None:
    output = runner().forward([Span([0], 0, TEXT[:6], 1)], state_layers=(0, 2))
    assert {layer: tuple(state.shape) for layer, state in output.hidden_by_layer.items()} == {0: (6, 32), 2: (6, 32)}
    assert runner().forward([Span([0], 0, TEXT[:6], 1)]).hidden_by_layer == {}

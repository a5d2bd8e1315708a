"""Passes that fit no rectangle are recorded too, and are those of `ModelRunner`."""

from dataclasses import replace

import pytest

from paceline.models import gpu_runner
from paceline.models.gpu_pass import PassKind
from paceline.models.gpu_ragged import MAX_RAGGED_ROWS, RaggedSize, most_ragged_rows, ragged_size, ragged_sizes
from paceline.models.gpu_runner import GpuRunner
from paceline.models.runner import ModelRunner, Span
from tests.models.gpu.cases import SHAPE, close, models, same, tokens, tree

BLOCKS = 24


@pytest.fixture(autouse=True)
def no_rectangles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_runner, "MAX_GRAPH_ROWS", 0)


class Pair:
    """Two runners that are told the same."""

    def __init__(self) -> None:
        model, reference = models(replace(SHAPE, max_position=256))
        self.ours, self.theirs = GpuRunner(model, BLOCKS), ModelRunner(reference, BLOCKS)

    def check(self, spans: list[Span], capture: tuple[int, ...] = (), last_hidden: bool = False) -> None:
        same(self.ours.forward(spans, capture, last_hidden), self.theirs.forward(spans, capture, last_hidden))
        for mine, other in zip(self.ours.cache, self.theirs.cache, strict=True):
            for part in range(2):
                close(mine[part][:BLOCKS], other[part])


def test_a_prompt_beside_sequences_that_decode() -> None:
    pair = Pair()
    pair.check([Span([9, 3], 0, tokens(20), 1), Span([0], 0, tokens(3), 1), Span([7], 0, tokens(1), 0)])
    pair.check([Span([9, 3], 20, tokens(1), 1), Span([7], 1, tokens(1), 1), Span([5, 6], 0, tokens(30), 0)])
    assert len(pair.ours._ragged) == 1


def test_passes_of_other_sizes_leave_nothing_behind() -> None:
    """They share where they are told what to do."""
    pair, many = Pair(), [Span([s % BLOCKS], 4 * (s // BLOCKS), tokens(2, s), 1) for s in range(40)]
    pair.check([Span(list(range(9)), 0, tokens(140), 1)])
    pair.check(many)
    pair.check([Span([11], 0, tokens(3), 1), Span([2], 0, tokens(2), 2)])
    pair.check([Span(list(range(9)), 0, tokens(140), 3)])
    assert {size for size, _ in pair.ours._ragged} == {RaggedSize(1, 192), RaggedSize(64, 128), RaggedSize(32, 128)}


def test_trees_and_hidden_states() -> None:
    pair, states = Pair(), {"capture": (0, 2), "last_hidden": True}
    pair.check([Span([4], 0, tokens(2), 1), Span([2], 0, tokens(2), 1)], **states)
    pair.check([tree([4], 2), Span([2], 2, tokens(3, 2), 3)], **states)
    pair.check([Span([4], 2, tokens(5, 2), 0), tree([2], 2)], **states)


def test_what_a_run_gave_stays_when_another_follows() -> None:
    pair, states = Pair(), {"capture": (1,), "last_hidden": True}
    first = [Span([4], 0, tokens(4), 1)]
    before = pair.ours.forward(first, **states)
    pair.ours.forward([Span([2], 0, tokens(6, 1), 2)], **states)
    same(before, pair.theirs.forward(first, **states))


def test_nothing_is_recorded_after_a_rehearsal() -> None:
    pair = Pair()
    pair.ours.rehearse(max_num_seqs=40, max_rows=200, longest=200)
    sizes = set(pair.ours._ragged)
    pair.check([Span([s], 0, tokens(2, s), 1) for s in range(20)])
    pair.check([Span(list(range(12)), 0, tokens(190), 1)])
    assert set(pair.ours._ragged) == sizes == {(size, PassKind()) for size in ragged_sizes(40, 200)}


@pytest.mark.parametrize("max_num_seqs", [1, 40, 300])
def test_every_size_is_among_those_rehearsed(max_num_seqs: int) -> None:
    sizes = set(ragged_sizes(max_num_seqs, MAX_RAGGED_ROWS))
    met = {
        ragged_size(count, rows)
        for count in range(1, min(max_num_seqs, 256) + 1)
        for rows in range(count, MAX_RAGGED_ROWS + 1)
    }
    assert met <= sizes
    assert len(sizes) <= 3 * 24 + 24  # some tens of milliseconds each


def test_little_of_a_large_pass_is_padding() -> None:
    assert all(ragged_size(1, rows).rows <= rows * 9 // 8 for rows in range(512, MAX_RAGGED_ROWS + 1))


def test_small_models_have_larger_passes_recorded() -> None:
    assert most_ragged_rows(270_000_000) == MAX_RAGGED_ROWS
    assert most_ragged_rows(16_000_000_000) == 500
    assert most_ragged_rows(140_000_000_000) < 64

"""Captured ragged passes equal those of `ModelRunner`."""

import pytest

from paceline.models.decoder.decoder import ForwardOutput
from paceline.models.device.cuda_graph import MAX_GRAPH_ROWS
from paceline.models.runner.gpu import runner as gpu_runner
from paceline.models.runner.gpu.passes import PassKind
from paceline.models.runner.gpu.ragged import (
    MAX_RAGGED_ROWS,
    RaggedGraph,
    RaggedSize,
    max_captured_rows,
    ragged_size,
    ragged_sizes,
)
from paceline.models.runner.gpu.runner import GpuRunner
from paceline.models.runner.runner import ModelRunner, Span
from tests.models.gpu.cases import SHAPE, close, models, same, tokens, tree
from tests.specs import changed

BLOCKS = 24


@pytest.fixture(autouse=True)
def no_padded_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_runner, "MAX_GRAPH_ROWS", 0)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[RaggedSize]:
    """Sizes of the captured passes that ran, in order."""
    sizes: list[RaggedSize] = []
    run = RaggedGraph.run

    def recorded(graph: RaggedGraph, spans: list[Span]) -> ForwardOutput:
        sizes.append(graph.size)
        return run(graph, spans)

    monkeypatch.setattr(RaggedGraph, "run", recorded)
    return sizes


class Pair:
    """A GPU runner and its reference, with the same inputs."""

    def __init__(self) -> None:
        model, reference = models(changed(SHAPE, max_position=256))
        self.ours, self.theirs = GpuRunner(model, BLOCKS), ModelRunner(reference, BLOCKS)

    def check(self, spans: list[Span], state_layers: tuple[int, ...] = (), last_hidden: bool = False) -> None:
        same(self.ours.forward(spans, state_layers, last_hidden), self.theirs.forward(spans, state_layers, last_hidden))
        for mine, other in zip(self.ours.cache, self.theirs.cache, strict=True):
            for part in range(2):
                close(mine[part][:BLOCKS], other[part])


def test_a_prompt_and_decoding_sequences_in_one_batch(used: list[RaggedSize]) -> None:
    pair = Pair()
    pair.ours.capture_ragged(3, 64)
    pair.check([Span([9, 3], 0, tokens(20), 1), Span([0], 0, tokens(3), 1), Span([7], 0, tokens(1), 0)])
    pair.check([Span([9, 3], 20, tokens(1), 1), Span([7], 1, tokens(1), 1), Span([5, 6], 0, tokens(30), 0)])
    assert used == [RaggedSize(32, 128)] * 2


@pytest.mark.interpreted
def test_passes_of_other_sizes_do_not_interfere(used: list[RaggedSize]) -> None:
    """All sizes share the input buffers."""
    pair, many = Pair(), [Span([s % BLOCKS], 4 * (s // BLOCKS), tokens(2, s), 1) for s in range(40)]
    pair.ours.capture_ragged(40, 192)
    long = [Span(list(range(9)), 0, tokens(140), 1), Span([20], 0, tokens(2), 0)]
    for spans in (long, many, [Span([11], 0, tokens(3), 1), Span([2], 0, tokens(2), 2)], long):
        pair.check(spans)
    assert used == [RaggedSize(32, 192), RaggedSize(64, 128), RaggedSize(32, 128), RaggedSize(32, 192)]


def test_trees_and_hidden_states(used: list[RaggedSize]) -> None:
    pair, states = Pair(), {"state_layers": (0, 2), "last_hidden": True}
    pair.ours.capture_ragged(2, 64, [PassKind(is_tree, (0, 2), True) for is_tree in (False, True)])
    pair.check([Span([4], 0, tokens(2), 1), Span([2], 0, tokens(2), 1)], **states)
    pair.check([tree([4], 2), Span([2], 2, tokens(3, 2), 3)], **states)
    pair.check([Span([4], 2, tokens(5, 2), 0), tree([2], 2)], **states)
    assert len(used) == 3


def test_results_survive_the_next_run(used: list[RaggedSize]) -> None:
    pair, states = Pair(), {"state_layers": (1,), "last_hidden": True}
    pair.ours.capture_ragged(2, 64, [PassKind(False, (1,), True)])
    first = [Span([4], 0, tokens(4), 1), Span([5], 0, tokens(1), 1)]
    before = pair.ours.forward(first, **states)
    pair.ours.forward([Span([2], 0, tokens(6, 1), 2), Span([3], 0, tokens(1), 0)], **states)
    same(before, pair.theirs.forward(first, **states))
    assert len(used) == 2


def test_sizes_that_were_not_captured_run_eagerly(used: list[RaggedSize]) -> None:
    pair = Pair()
    pair.check([Span([4], 0, tokens(4), 1), Span([5], 0, tokens(1), 1)])
    assert used == []
    assert pair.ours._ragged == {}


@pytest.mark.interpreted
def test_warm_up_captures_ragged_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_runner, "MAX_GRAPH_ROWS", 8)
    pair = Pair()
    pair.ours.warm_up(max_num_seqs=3, max_rows=24, longest=24)
    assert set(pair.ours._ragged) == {(size, PassKind()) for size in ragged_sizes(3, 24)}
    few = Pair().ours
    few.warm_up(max_num_seqs=3, max_rows=3, longest=1)
    assert few._ragged == {}


@pytest.mark.parametrize("max_num_seqs", [1, 40, 300])
def test_warm_up_covers_every_size(max_num_seqs: int) -> None:
    sizes = set(ragged_sizes(max_num_seqs, MAX_RAGGED_ROWS))
    met = {
        ragged_size(count, rows)
        for count in range(1, min(max_num_seqs, 256) + 1)
        for rows in range(count, MAX_RAGGED_ROWS + 1)
        if count > 1 or rows > MAX_GRAPH_ROWS  # padded passes cover the others
    }
    assert met <= sizes
    assert len(sizes) <= 3 * 24 + 24  # tens of milliseconds each


def test_a_large_pass_has_little_padding() -> None:
    assert all(ragged_size(1, rows).rows <= rows * 9 // 8 for rows in range(1024, MAX_RAGGED_ROWS + 1))


def test_small_models_capture_larger_passes() -> None:
    assert max_captured_rows(270_000_000) == MAX_RAGGED_ROWS
    assert max_captured_rows(16_000_000_000) == 1062
    assert max_captured_rows(140_000_000_000) < 128

"""Padded and captured passes equal those of `ModelRunner`."""

import pytest

from paceline.core.clock import VirtualClock
from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.formats.layout import MAX_TREE_ROWS
from paceline.models.runner.gpu import runner as gpu_runner
from paceline.models.runner.gpu.passes import PassGraph, PassKind
from paceline.models.runner.gpu.ragged import RaggedGraph
from paceline.models.runner.gpu.runner import GpuRunner, captured_passes
from paceline.models.runner.runner import ModelRunner, Span, early_exit
from paceline.policy.step import padded_size
from tests.models.gpu.cases import SHAPE, close, models, same, tokens, tree
from tests.specs import changed

BLOCKS = 12


class Pair:
    """A GPU runner and its reference, with the same inputs."""

    def __init__(self) -> None:
        model, reference = models(SHAPE)
        self.ours, self.theirs = GpuRunner(model, BLOCKS), ModelRunner(reference, BLOCKS)

    def check(self, spans: list[Span], state_layers: tuple[int, ...] = (), last_hidden: bool = False) -> None:
        same(self.ours.forward(spans, state_layers, last_hidden), self.theirs.forward(spans, state_layers, last_hidden))

    def check_cache(self) -> None:
        """Compare all blocks but the scratch block."""
        for mine, other in zip(self.ours.cache, self.theirs.cache, strict=True):
            for part in range(2):
                close(mine[part][:BLOCKS], other[part])

    @property
    def num_graphs(self) -> int:
        return len(self.ours._graphs) + len(self.ours._ragged)


def test_spans_of_different_lengths_and_unused_slots() -> None:
    pair = Pair()
    tables = [[9, 3, 10], [0, 5], [7]]
    pair.check([Span(tables[0], 0, tokens(4), 1), Span(tables[1], 0, tokens(3), 3), Span(tables[2], 0, tokens(1), 1)])
    pair.check([Span(tables[0], 4, tokens(3, 4), 2), Span(tables[1], 3, tokens(1, 3), 1)])
    pair.check_cache()


def test_a_graph_keeps_no_inputs_of_earlier_runs() -> None:
    pair = Pair()
    pair.check([Span([4, 1], 0, tokens(4), 4), Span([2], 0, tokens(4), 4)])
    pair.check([Span([6], 0, tokens(3, 5), 1), Span([4, 1], 4, tokens(1, 4), 1)])
    assert pair.num_graphs == 1
    pair.check_cache()


def test_trees_and_chains_in_one_batch() -> None:
    pair = Pair()
    pair.check([Span([4], 0, tokens(2), 1), Span([2], 0, tokens(2), 1)])
    pair.check([tree([4], 2), Span([2], 2, tokens(3, 2), 3)])
    pair.check([Span([4], 2, tokens(5, 2), 5), tree([2], 2)])
    assert pair.num_graphs == 2
    pair.check_cache()


def test_hidden_states_are_those_of_unpadded_rows() -> None:
    pair = Pair()
    spans = [Span([4], 0, tokens(3), 1), Span([2], 0, tokens(1), 1), Span([8], 0, tokens(2), 2)]
    pair.check(spans, state_layers=(0, 2), last_hidden=True)


def test_large_passes_run_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_runner, "MAX_GRAPH_ROWS", 4)
    monkeypatch.setattr(gpu_runner, "max_captured_rows", lambda weight_bytes: 4)
    pair = Pair()
    pair.check([Span([4], 0, tokens(5), 1)])
    assert pair.num_graphs == 0
    pair.check_cache()


def test_spans_without_logits() -> None:
    pair = Pair()
    pair.check([Span([4], 0, tokens(3), 0), Span([2], 0, tokens(2), 1)])
    pair.check([Span([4], 3, tokens(2, 3), 0), Span([2], 2, tokens(1, 2), 0)])
    assert pair.num_graphs == 2
    pair.check_cache()


def test_an_early_exit_shares_the_cache() -> None:
    pair = Pair()
    pair.check([Span([4], 0, tokens(4), 1)])
    early, reference = (early_exit(runner, 1) for runner in (pair.ours, pair.theirs))
    span = Span([4], 4, tokens(2, 4), 1)
    same(early.forward([span]), reference.forward([span]))
    pair.check_cache()


def test_the_size_of_a_padded_pass_is_that_of_its_longest_span() -> None:
    runner = GpuRunner(models(SHAPE)[0], BLOCKS)
    spans = [Span([4], 0, tokens(3), 3), Span([2], 0, tokens(1), 1), Span([8], 0, tokens(1), 1)]
    assert runner.padded_shape(spans) == (4, 16)
    assert ModelRunner(models(SHAPE)[1], BLOCKS).padded_shape(spans) is None
    assert runner.padded_shape([Span([4], 0, tokens(1), 1)] * (gpu_runner.MAX_GRAPH_ROWS + 1)) is None


@pytest.mark.parametrize(("max_num_seqs", "longest"), [(1, 2048), (5, 100), (200, 2048), (256, 30)])
def test_warm_up_captures_every_padded_pass(max_num_seqs: int, longest: int) -> None:
    met = {
        (batch, rows, PassKind(is_tree))
        for count in range(1, max_num_seqs + 1)
        for most in range(1, longest + 1)
        if (batch := padded_size(count)) * (rows := padded_size(most)) <= gpu_runner.MAX_GRAPH_ROWS
        for is_tree in (False, True)
        # a tree has 2 to 64 rows; in a batch with a prompt the pass may have more
        if not is_tree or (most > 1 and (most <= MAX_TREE_ROWS or count > 1))
    }
    assert met == set(captured_passes(max_num_seqs, longest, [PassKind(False), PassKind(True)]))


@pytest.mark.interpreted
def test_padding_past_the_longest_context() -> None:
    """Two sequences are padded to the rows of the longer, which can be far beyond the context window."""
    shape = changed(SHAPE, max_position=64)
    model, reference = models(shape)
    ours, theirs = GpuRunner(model, 8), ModelRunner(reference, 8)
    for spans in (
        [Span([0, 1, 2, 3], 0, tokens(63), 1)],
        [Span([0, 1, 2, 3], 63, tokens(1, 63), 1), Span([4, 5, 6, 7], 0, tokens(64), 0)],
    ):
        same(ours.forward(spans), theirs.forward(spans))
    assert ours.table_width * BLOCK_SIZE >= shape.max_position + gpu_runner.MAX_GRAPH_ROWS


def test_warm_up_stays_in_the_context_window() -> None:
    """The rotary table ends with the context window."""
    runner = GpuRunner(models(changed(SHAPE, max_position=24))[0], BLOCKS)
    runner.warm_up(max_num_seqs=1, max_rows=64, longest=64)


@pytest.mark.interpreted
def test_after_warm_up_no_graph_is_captured() -> None:
    pair, states = Pair(), {"state_layers": (0, 2), "last_hidden": True}
    kinds = PassKind(), PassKind(False, *states.values()), PassKind(True, *states.values())
    pair.ours.warm_up(max_num_seqs=2, max_rows=16, longest=16, kinds=kinds)
    count = pair.num_graphs
    pair.check([Span([4], 0, tokens(3), 1), Span([2], 0, tokens(7), 2)])
    pair.check([Span([4], 3, tokens(2), 1)], **states)
    pair.check([tree([4], 5), Span([2], 7, tokens(3, 2), 3)], **states)
    assert pair.num_graphs == count


def test_a_pass_is_timed_with_and_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_runner, "MAX_GRAPH_ROWS", 8)
    monkeypatch.setattr(gpu_runner, "max_captured_rows", lambda weight_bytes: 50)
    runner = GpuRunner(models(SHAPE)[0], BLOCKS)
    for count, kind in ((130, type(None)), (40, RaggedGraph), (2, PassGraph)):
        spans = [Span([0], 0, tokens(1), 1)] * count
        assert 0.0 < runner.measure_seconds(spans, VirtualClock()) < 60.0
        assert (len(runner._graphs), len(runner._ragged)) == (count <= 8, count <= 50)
        assert type(runner._graph_of(spans)) is kind


def test_an_early_exit_shares_the_workspace() -> None:
    runner = GpuRunner(models(SHAPE)[0], BLOCKS)
    exit_runner = early_exit(runner, 1)
    assert isinstance(exit_runner, GpuRunner)
    assert exit_runner.workspace is runner.workspace


def test_graphs_share_the_memory_of_their_states() -> None:
    """Results are copies, which stay valid in the next run of any size."""
    pair, states = Pair(), {"state_layers": (1,), "last_hidden": True}
    first, second = [Span([4], 0, tokens(4), 1)], [Span([2], 0, tokens(2), 1)]
    before = pair.ours.forward(first, **states)
    pair.ours.forward(second, **states)
    same(before, pair.theirs.forward(first, **states))
    assert pair.ours.workspace.states(2, 2).data_ptr() == pair.ours.workspace.states(2, 4).data_ptr()


def test_graphs_share_the_memory_of_their_logits() -> None:
    """Graphs run one after another, so that they need one buffer."""
    runner = GpuRunner(models(SHAPE)[0], BLOCKS)
    where = {runner.forward([Span([0, 1], 0, tokens(count), count)]).logits.data_ptr() for count in (8, 4, 2, 1)}
    assert where == {runner.workspace.logits(1).data_ptr()}

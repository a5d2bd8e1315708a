"""Times of an EAGLE head before the first request."""

from collections.abc import Sequence

import pytest

from paceline.core.clock import VirtualClock
from paceline.engine.sizing.calibration import DRAFT_SIZES as GRAPH_SIZES
from paceline.engine.sizing.calibration import HEAD_SIZES as SIZES
from paceline.engine.sizing.calibration import measure_head, measure_head_in_graphs
from paceline.models.heads.eagle.eagle import EagleRunner
from paceline.speculation.drafts.drafts import DraftBatch
from paceline.speculation.proposer import SequenceProgress
from paceline.speculation.proposers.eagle.eagle import EagleProposer
from tests.fakes import tiny_model
from tests.heads import tiny_eagle


class TimedProposer(EagleProposer):
    """A round takes 1 ms, 2 ms a sequence and 0.5 ms a node; the first one 100 ms more."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(EagleRunner(tiny_eagle(tiny_model()), 64, 64), 64)
        self.clock, self.nodes, self.num_rounds, self.drafted = clock, 0, 0, list[int]()

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        self.nodes = batch[0].depth
        super().observe(batch)

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        self.clock.advance(0.001 + 0.002 * len(sequence_ids) + 0.0005 * self.nodes + 0.1 * (self.num_rounds == 0))
        self.num_rounds += 1
        drafts = super().collect(sequence_ids, deadline)
        self.drafted.append(sum(drafts.counts))
        return drafts


@pytest.mark.parametrize("max_num_seqs", [1, 4, 64])
def test_the_first_round_does_not_count(max_num_seqs: int) -> None:
    clock = VirtualClock()
    proposer = TimedProposer(clock)
    free = proposer.num_free_blocks
    lines = measure_head(proposer, proposer.runner.model, max_num_seqs, 8, clock)
    assert set(lines) == {min(size, max_num_seqs) for size in SIZES}
    for count, line in lines.items():
        assert line.seconds(3) == pytest.approx(0.001 + 0.002 * count + 0.0015)
    assert proposer.num_free_blocks == free
    assert all(proposer.drafted)  # every round drafted


@pytest.mark.parametrize("max_num_seqs", [1, 4, 256])
def test_in_graphs_a_line_fits_all_shapes(max_num_seqs: int) -> None:
    shapes = {1: (1, 3, 7), 8: (1, 3), 256: (1,)}
    runner = EagleRunner(tiny_eagle(tiny_model()), 64, 64)
    costs = measure_head_in_graphs(
        lambda size: {nodes: 0.001 * size + 0.002 * nodes for nodes in shapes.get(size, (1, 3))}, runner, max_num_seqs
    )
    assert set(costs.lines) == {min(size, max_num_seqs) for size in GRAPH_SIZES}
    assert costs.lines[1].seconds(5) == pytest.approx(0.011)
    assert costs.lines[max_num_seqs].seconds(1) == pytest.approx(0.001 * max_num_seqs + 0.002)
    assert costs.prefill_seconds > 0.0
    assert not runner.cache[0][0][: runner.num_blocks].any()

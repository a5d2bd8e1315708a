"""Times of an EAGLE head before the first request."""

from collections.abc import Sequence

import pytest

from paceline.core.clock import VirtualClock
from paceline.engine.sizing.head_calibration import SIZES, measure_head
from paceline.models.drafts.eagle import EagleRunner
from paceline.speculation.drafts import DraftBatch
from paceline.speculation.proposer import Progress
from paceline.speculation.proposers.eagle import EagleProposer
from tests.fakes import tiny_model
from tests.heads import tiny_eagle


class TimedProposer(EagleProposer):
    """A round takes 1 ms, 2 ms a sequence and 0.5 ms a node; the first one 100 ms more."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(EagleRunner(tiny_eagle(tiny_model()), 64, 64), 64)
        self.clock, self.nodes, self.num_rounds, self.drafted = clock, 0, 0, list[int]()

    def observe(self, batch: Sequence[Progress]) -> None:
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

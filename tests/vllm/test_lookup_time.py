"""Times of lookups on this host."""

import pytest

from paceline.core.clock import VirtualClock
from paceline.speculation.drafts.drafts import DraftBatch
from paceline.speculation.proposer import ProposerTraits
from paceline.vllm.decisions import SEQUENCES, TOKENS, LookupTime


class TimedLookup:
    """Indexes a token in 2 microseconds and drafts in 30."""

    traits = ProposerTraits()

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.indexed = clock, {}

    def observe(self, batch):
        for one in batch:
            new = len(one.ids) - self.indexed.get(one.sequence_id, 0)
            self.indexed[one.sequence_id] = len(one.ids)
            self.clock.advance(30e-6 + (2e-6 * new if new > 1 else 0.0))

    def collect(self, sequence_ids, deadline):
        return DraftBatch.empty()

    def close(self, sequence_ids):
        pass


def test_indexing_and_drafting_are_told_apart() -> None:
    clock = VirtualClock()
    times = LookupTime.measure(TimedLookup(clock), clock, depth=4)
    assert times.per_sequence == pytest.approx(30e-6)
    assert times.per_token == pytest.approx(2e-6)
    assert times.lines[64].seconds(4) == pytest.approx(64 * 30e-6)
    assert times.drafting_share(SEQUENCES, 0) == 1.0
    assert times.drafting_share(SEQUENCES, SEQUENCES * TOKENS) == pytest.approx(30 / (30 + 2 * TOKENS))

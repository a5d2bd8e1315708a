"""Times of a draft model before the first request."""

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.core.clock import VirtualClock
from paceline.engine.sizing.calibration import CONTEXT, measure_drafts
from paceline.engine.sizing.calibration import DRAFT_PREFILL_ROWS as PREFILL_ROWS
from paceline.engine.sizing.calibration import DRAFT_SIZES as SIZES
from paceline.models.runner.runner import ModelRunner, Span
from tests.fakes import TINY, tiny_model
from tests.specs import changed


class TimedRunner(ModelRunner):
    """A pass takes 10 ms and 1 ms a row."""

    def __init__(self, clock: VirtualClock, num_blocks: int) -> None:
        super().__init__(tiny_model(config=changed(TINY, max_position=2048)), num_blocks)
        self.clock, self.passes = clock, list[Sequence[Span]]()

    def forward(self, spans: Sequence[Span], state_layers: tuple[int, ...] = ()) -> Any:
        self.passes.append(spans)
        self.clock.advance(0.01 + 0.001 * sum(len(span.tokens) for span in spans))
        return super().forward(spans, state_layers)


def test_the_first_pass_of_a_round_has_two_rows() -> None:
    clock = VirtualClock()
    costs = measure_drafts(TimedRunner(clock, 400), 8, clock)
    assert {count: round(line.seconds(3), 6) for count, line in costs.lines.items()} == {1: 0.034, 8: 0.062}
    assert costs.prefill_seconds == pytest.approx((0.01 + 0.001 * PREFILL_ROWS) / PREFILL_ROWS)


@pytest.mark.parametrize("num_blocks", [2, 9, 40, 700])
@pytest.mark.parametrize("max_num_seqs", [1, 5, 64])
def test_passes_fit_into_the_cache(num_blocks: int, max_num_seqs: int) -> None:
    clock = VirtualClock()
    runner = TimedRunner(clock, num_blocks)
    costs = measure_drafts(runner, max_num_seqs, clock)
    assert set(costs.lines) == {min(size, max_num_seqs) for size in SIZES}
    for spans in runner.passes:
        assert all(block < num_blocks for span in spans for block in span.blocks)
        assert all(span.context_len <= CONTEXT for span in spans)

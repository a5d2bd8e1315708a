"""Times of target passes before the first request."""

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.core.clock import VirtualClock
from paceline.engine.sizing.calibration import MAX_SECONDS, measure_context, measure_passes
from paceline.models.runner.runner import ModelRunner, Span
from tests.fakes import TINY, request, run, tiny_engine, tiny_model
from tests.specs import changed


class TimedRunner(ModelRunner):
    """A pass takes `base`, 1 ms a row and `per_token` for each token of context; the first pass of a size takes twice as
    long."""

    def __init__(self, clock: VirtualClock, base: float, per_token: float = 0.0, num_blocks: int = 4) -> None:
        super().__init__(tiny_model(config=changed(TINY, max_position=2048)), num_blocks)
        self.clock, self.base, self.per_token, self.seen = clock, base, per_token, set[int]()

    def forward(self, spans: Sequence[Span], state_layers: tuple[int, ...] = ()) -> Any:
        cold = len(spans) not in self.seen
        self.seen.add(len(spans))
        context = self.per_token * sum(span.context_len for span in spans)
        self.clock.advance((self.base + 0.001 * len(spans)) * (2 if cold else 1) + context)
        return super().forward(spans, state_layers)


def test_the_first_pass_of_each_size_is_not_timed() -> None:
    clock = VirtualClock()
    passes = measure_passes(TimedRunner(clock, 0.01), 24, 24, clock)
    assert {rows: round(seconds, 9) for rows, seconds in passes.items()} == {
        rows: round(0.01 + 0.001 * rows, 9) for rows in (1, 2, 4, 8, 16)
    }


def test_passes_have_at_most_max_num_seqs_sequences() -> None:
    clock, shapes = VirtualClock(), list[tuple[int, int]]()
    runner = TimedRunner(clock, 0.01)
    forward = runner.forward
    runner.forward = lambda spans, *rest: shapes.append((len(spans), len(spans[0].tokens))) or forward(spans, *rest)  # type: ignore[assignment, func-returns-value]
    assert list(measure_passes(runner, 6, 24, clock)) == [1, 2, 4, 8, 15]
    assert list(dict.fromkeys(shapes)) == [(1, 1), (2, 1), (4, 1), (4, 2), (5, 3)]


def test_a_slow_machine_measures_fewer_sizes() -> None:
    clock = VirtualClock()
    passes = measure_passes(TimedRunner(clock, MAX_SECONDS / 6), 64, 64, clock)
    assert list(passes) == [1, 2]


@pytest.mark.parametrize("num_blocks", [2, 9, 40, 700])
@pytest.mark.parametrize("max_num_seqs", [1, 4, 64])
def test_the_time_per_token_of_context(num_blocks: int, max_num_seqs: int) -> None:
    clock = VirtualClock()
    runner = TimedRunner(clock, 0.01, 1e-6, num_blocks)
    assert measure_context(runner, max_num_seqs, clock) == pytest.approx(1e-6)


def test_context_is_measured_with_many_sequences() -> None:
    """Two long contexts would leave most of a GPU idle."""
    clock, counts = VirtualClock(), set[int]()
    runner = TimedRunner(clock, 0.01, 1e-6, num_blocks=700)
    forward = runner.forward
    runner.forward = lambda spans, *rest: counts.add(len(spans)) or forward(spans, *rest)  # type: ignore[assignment, func-returns-value]
    measure_context(runner, 64, clock)
    assert counts == {700 * 16 // 256}
    counts.clear()
    measure_context(runner, 8, clock)
    assert counts == {8}


def test_contexts_grow_until_their_cost_is_measurable() -> None:
    clock = VirtualClock()
    runner = TimedRunner(clock, 0.01, 1e-5, num_blocks=700)
    longest: list[int] = []
    forward = runner.forward
    runner.forward = lambda spans, *rest: longest.append(max(s.context_len for s in spans)) or forward(spans, *rest)  # type: ignore[assignment, func-returns-value]
    # A context four times as long does not fit into the model's window
    for per_token, enough in ((1e-5, 256), (2e-6, 1024), (0.0, 1024)):
        longest.clear()
        runner.per_token = per_token
        assert measure_context(runner, 4, clock) == pytest.approx(per_token)
        assert max(longest) == enough


def test_a_sliding_window_has_no_cost_of_context() -> None:
    clock = VirtualClock()
    runner = TimedRunner(clock, 0.01, 1e-6, num_blocks=700)
    runner.model.config = changed(runner.model.config, sliding_window=64)
    assert measure_context(runner, 4, clock) == 0.0


def test_a_cache_of_one_block_measures_nothing() -> None:
    clock = VirtualClock()
    assert measure_context(TimedRunner(clock, 0.01, 1e-6, num_blocks=1), 4, clock) == 0.0


def test_measuring_does_not_change_texts() -> None:
    one = request("r", range(20), max_tokens=10, seed=1)
    engine = tiny_engine(tiny_model())
    measure_passes(engine.runner, 32, 32, VirtualClock())
    measure_context(engine.runner, 4, VirtualClock())
    assert all(not part[1:].any() for layer in engine.runner.cache for part in layer)
    assert run(engine, [one]).tokens == run(tiny_engine(tiny_model()), [one]).tokens

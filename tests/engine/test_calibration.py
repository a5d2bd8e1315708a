from collections.abc import Sequence
from typing import Any

from paceline.core.clock import VirtualClock
from paceline.engine.calibration import MAX_SECONDS, measure_passes
from paceline.models.runner import ModelRunner, Span
from tests.fakes import request, run, tiny_engine, tiny_model


class TimedRunner(ModelRunner):
    """A pass takes `base` and a millisecond a row; the first of each size twice as long."""

    def __init__(self, clock: VirtualClock, base: float) -> None:
        super().__init__(tiny_model(), 4)
        self.clock, self.base, self.seen = clock, base, set[int]()

    def forward(self, spans: Sequence[Span], capture: tuple[int, ...] = ()) -> Any:
        cold = len(spans) not in self.seen
        self.seen.add(len(spans))
        self.clock.advance((self.base + 0.001 * len(spans)) * (2 if cold else 1))
        return super().forward(spans, capture)


def test_each_size_is_timed_warm() -> None:
    clock = VirtualClock()
    passes = measure_passes(TimedRunner(clock, 0.01), 24, clock)
    assert {rows: round(seconds, 9) for rows, seconds in passes.items()} == {
        rows: round(0.01 + 0.001 * rows, 9) for rows in (1, 2, 4, 8, 16)
    }


def test_a_slow_machine_is_measured_less() -> None:
    clock = VirtualClock()
    passes = measure_passes(TimedRunner(clock, MAX_SECONDS / 6), 64, clock)
    assert list(passes) == [1, 2]


def test_measuring_leaves_no_mark_on_the_text() -> None:
    one = request("r", range(20), max_tokens=10, seed=1)
    engine = tiny_engine(tiny_model())
    measure_passes(engine.runner, 32, VirtualClock())
    assert run(engine, [one]).tokens == run(tiny_engine(tiny_model()), [one]).tokens

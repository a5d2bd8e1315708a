"""The published rule `threshold`, for comparison with `goodput`. It knows nothing of cost.

Over the last 100 rounds (it waits for 10) the mean of accepted / drafted moves K:
above 0.9, K + 1 up to 10; above 0.8, keep; above 0.6 and K > 3, K - 1; at most 0.6, K - 2 down to 1. It starts at 5.
The bounds 1 and 10 may be others.

State is kept per traffic category. Each sequence's round enters the window; K moves once a step, so that a large batch
does not multiply its speed. At batch 1 this is the rule to the letter.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.speculation.depth.policy import Candidate, StepObservation

WINDOW = 100
NEEDED = 10
START, LEAST, MOST = 5, 1, 10


@dataclass(slots=True)
class _State:
    depth: int
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))


class ThresholdDepth:
    """`DepthPolicy`: K follows the mean acceptance rate of the last rounds."""

    advantage: float | None = None

    def __init__(self, least: int = LEAST, most: int = MOST) -> None:
        self._least, self._most = min(least, most), most
        self._start = min(max(START, least), most)
        self._states: dict[str, _State] = {}

    def observe(self, step: StepObservation) -> None:
        touched = {}
        for seen in step.rounds:
            if seen.drafted:
                state = self._states.setdefault(seen.category, _State(self._start))
                state.rates.append(seen.draft_acceptance_rate)
                touched[seen.category] = state
        for state in touched.values():
            if len(state.rates) >= NEEDED:
                state.depth = self._moved(state.depth, round(sum(state.rates) / len(state.rates), 9))

    def restart(self, category: str, alpha: float) -> None:
        self._states.pop(category, None)

    def rests(self, batch: int) -> bool:
        return False

    def decide(self, batch: Sequence[Candidate]) -> list[int]:
        return [min(self.depth(candidate.category), candidate.max_depth) for candidate in batch]

    def depth(self, category: str) -> int:
        state = self._states.get(category)
        return self._start if state is None else state.depth

    def _moved(self, depth: int, rate: float) -> int:
        if rate > 0.9:
            return min(self._most, depth + 1)
        if rate > 0.8:
            return depth
        if rate > 0.6:
            return max(self._least, depth - 1) if depth > 3 else depth
        return max(self._least, depth - 2)

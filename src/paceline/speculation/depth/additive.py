"""The published rule `additive` (additive increase, multiplicative decrease), for comparison with `goodput`.

A good round: K = min(16, K + 1) and the count of low rounds is zero. A low one, accepted / drafted under the minimum,
leaves K alone until it is the third running: then K = max(2, floor(0.75 K)) and the count starts from zero. It starts
at 6. The bounds 2 and 16 may be others.

State is kept per traffic category, and a step is one round of it: the mean of accepted / drafted over its sequences. At
batch 1 this is the rule to the letter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import InvalidConfig
from paceline.speculation.depth.policy import Candidate, StepObservation

START, LEAST, MOST = 6, 2, 16
LOW_ROUNDS = 3


@dataclass(slots=True)
class _State:
    depth: int
    low: int = 0


class AdditiveDepth:
    """`DepthPolicy`: one more after a good round, a quarter less after three low ones running."""

    advantage: float | None = None

    def __init__(self, minimum: float = 0.65, least: int = LEAST, most: int = MOST) -> None:
        if not 0.0 < minimum <= 1.0:
            raise InvalidConfig(f"draft_acceptance_threshold must be in (0, 1], got {minimum}")
        self._minimum = minimum
        self._least, self._most = min(least, most), most
        self._start = min(max(START, least), most)
        self._states: dict[str, _State] = {}

    def observe(self, step: StepObservation) -> None:
        rates: dict[str, list[float]] = {}
        for seen in step.rounds:
            if seen.drafted:
                rates.setdefault(seen.category, []).append(seen.draft_acceptance_rate)
        for category, values in rates.items():
            state = self._states.setdefault(category, _State(self._start))
            if round(sum(values) / len(values), 9) >= self._minimum:
                state.depth, state.low = min(self._most, state.depth + 1), 0
            elif state.low + 1 < LOW_ROUNDS:
                state.low += 1
            else:
                state.depth, state.low = max(self._least, state.depth * 3 // 4), 0

    def restart(self, category: str, alpha: float) -> None:
        self._states.pop(category, None)

    def rests(self, batch: int) -> bool:
        return False

    def decide(self, batch: Sequence[Candidate]) -> list[int]:
        return [min(self.depth(candidate.category), candidate.max_depth) for candidate in batch]

    def depth(self, category: str) -> int:
        state = self._states.get(category)
        return self._start if state is None else state.depth

"""Depth policies that know nothing of cost, and `make_depth`, which makes the policy that a configuration names.

`fixed` drafts to one depth. `threshold` and `additive` are published rules, to compare with `goodput`.

In `threshold` the mean of accepted / drafted over the last 100 rounds (at least 10) moves K. Above 0.9, K grows by 1 up to 10.
Above 0.8 it stays. Above 0.6 it falls by 1 if it is over 3. At most 0.6, it falls by 2 down to 1. It starts at 5.

In `additive` (additive increase, multiplicative decrease) K = min(16, K + 1) after a good round. A low round has accepted /
drafted under the minimum. It leaves K alone until it is the third in a row: then K = max(2, floor(0.75 K)). It starts at 6.

The bounds are parameters. The two rules keep state per traffic class, and K moves once a step, so that a large batch does not
move it faster. At batch 1 they are the published rules exactly.

`make_breaker` makes the circuit breaker that a configuration names.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.core.config import PUBLISHED_DEPTHS, SpeculationConfig
from paceline.core.errors import InvalidConfig
from paceline.core.traffic import TrafficClass
from paceline.policy.depth.allocation import PaddedBatch
from paceline.policy.depth.breaker import Breaker, BreakerRule
from paceline.policy.depth.goodput import GoodputDepth
from paceline.policy.depth.observation import DepthCandidate, DepthPolicy, StepObservation

WINDOW = 100
"""Rounds in the mean of `threshold`."""
NEEDED = 10
"""Rounds before `threshold` moves K."""
LOW_ROUNDS = 3
"""Low rounds in a row before `additive` lowers K."""


class FixedDepth:
    """Takes the same depth in every step, for measurements."""

    advantage: float | None = None

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def observe(self, step: StepObservation) -> None:
        pass

    def restart(self, traffic: TrafficClass, alpha: float) -> None:
        pass

    def expect_prompts(self, rows: int) -> None:
        pass

    def skip_step(self, batch: int) -> bool:
        return False

    def decide(self, batch: Sequence[DepthCandidate]) -> list[int]:
        return [min(self._depth, candidate.max_depth) for candidate in batch]


@dataclass(slots=True)
class _ClassState:
    depth: int
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Acceptance rates of the last rounds (`threshold`)."""
    num_low: int = 0
    """Low rounds in a row (`additive`)."""


class _PublishedDepth:
    """A depth for every traffic class, between `least` and `most`."""

    advantage: float | None = None

    def __init__(self, least: int, most: int, start: int) -> None:
        self._least, self._most = min(least, most), most
        self._start = min(max(start, least), most)
        self._states: dict[TrafficClass, _ClassState] = {}

    def restart(self, traffic: TrafficClass, alpha: float) -> None:
        self._states.pop(traffic, None)

    def expect_prompts(self, rows: int) -> None:
        pass

    def skip_step(self, batch: int) -> bool:
        return False

    def decide(self, batch: Sequence[DepthCandidate]) -> list[int]:
        return [min(self.depth(candidate.traffic), candidate.max_depth) for candidate in batch]

    def depth(self, traffic: TrafficClass) -> int:
        state = self._states.get(traffic)
        return self._start if state is None else state.depth

    def _state(self, traffic: TrafficClass) -> _ClassState:
        return self._states.setdefault(traffic, _ClassState(self._start))


class ThresholdDepth(_PublishedDepth):
    """K follows the mean acceptance rate of the last rounds."""

    def __init__(self, least: int = 1, most: int = 10, start: int = 5) -> None:
        super().__init__(least, most, start)

    def observe(self, step: StepObservation) -> None:
        touched = {}
        for seen in step.rounds:
            if seen.drafted:
                state = self._state(seen.traffic)
                state.rates.append(seen.draft_acceptance_rate)
                touched[seen.traffic] = state
        for state in touched.values():
            if len(state.rates) >= NEEDED:
                state.depth = self._moved(state.depth, round(sum(state.rates) / len(state.rates), 9))

    def _moved(self, depth: int, rate: float) -> int:
        if rate > 0.9:
            return min(self._most, depth + 1)
        if rate > 0.8:
            return depth
        if rate > 0.6:
            return max(self._least, depth - 1) if depth > 3 else depth
        return max(self._least, depth - 2)


class AdditiveDepth(_PublishedDepth):
    """One more after a good round, a quarter less after three low rounds in a row."""

    def __init__(self, minimum: float = 0.65, least: int = 2, most: int = 16, start: int = 6) -> None:
        if not 0.0 < minimum <= 1.0:
            raise InvalidConfig(f"draft_acceptance_threshold must be in (0, 1], got {minimum}")
        super().__init__(least, most, start)
        self._minimum = minimum

    def observe(self, step: StepObservation) -> None:
        rates: dict[TrafficClass, list[float]] = {}
        for seen in step.rounds:
            if seen.drafted:
                rates.setdefault(seen.traffic, []).append(seen.draft_acceptance_rate)
        for traffic, values in rates.items():
            state = self._state(traffic)
            if round(sum(values) / len(values), 9) >= self._minimum:
                state.depth, state.num_low = min(self._most, state.depth + 1), 0
            elif state.num_low + 1 < LOW_ROUNDS:
                state.num_low += 1
            else:
                state.depth, state.num_low = max(self._least, state.depth * 3 // 4), 0


def make_depth(config: SpeculationConfig, max_depth: int, padded: Sequence[PaddedBatch] = ()) -> DepthPolicy:
    """`padded` are the rows of padded passes, if the engine has any."""
    if config.depth == "fixed" or max_depth == 0:
        return FixedDepth(max_depth)
    if config.depth == "goodput":
        return GoodputDepth(max_depth, padded=padded)
    bounds = {"most": max_depth}
    if config.min_depth is not None:
        bounds["least"] = config.min_depth
    if config.depth == "threshold":
        return ThresholdDepth(**bounds)
    if config.acceptance_threshold is None:
        return AdditiveDepth(**bounds)
    return AdditiveDepth(config.acceptance_threshold, **bounds)


def make_breaker(config: SpeculationConfig) -> Breaker:
    """The published rules count single rounds. The other rules count windows, by measured gain where it is known."""
    rule = BreakerRule(trips=config.breaker_rounds)
    if config.depth in PUBLISHED_DEPTHS:
        rule = replace(rule, window=1, conditional=False)
    if config.acceptance_threshold is not None:
        rule = replace(rule, threshold=config.acceptance_threshold)
    return Breaker(rule)

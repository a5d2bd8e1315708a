"""How deep to draft in each round of each text: the engine's depth rules and circuit breakers over calls of two servers."""

from collections import Counter
from collections.abc import Iterable

from paceline.core.config import SpeculationConfig
from paceline.core.speculation import MAX_DEPTH, SpeculationFlags
from paceline.core.status.engine import EngineStatus
from paceline.core.traffic import TrafficClass
from paceline.engine.stats import StepTotals, TrafficStatistics
from paceline.speculation.depth.breaker import Breaker, BreakerRule
from paceline.speculation.depth.drift import AcceptanceChange
from paceline.speculation.depth.policy import DepthCandidate, DraftingObservation, RoundObservation, StepObservation
from paceline.speculation.depth_rule import make_breaker, make_depth

METHOD = "endpoint"
_CALLS = TrafficClass(METHOD, "")
"""The key of the breaker of calls, which are not told apart by category."""
DEFAULT_DEPTH = 8


class RoundControl:
    """Every round is a step of one sequence. Time is passed in, and nothing here does I/O."""

    def __init__(self, config: SpeculationConfig) -> None:
        self.max_depth = min(MAX_DEPTH, DEFAULT_DEPTH if config.max_depth is None else config.max_depth)
        self._is_enabled = config.enabled
        self._policy = make_depth(config, self.max_depth)
        self._traffic = TrafficStatistics(make_breaker(config))
        self._calls = Breaker(BreakerRule(trips=1, window=1))
        """Opens when a call of the draft endpoint fails."""
        self._totals = StepTotals()
        self._running: set[int] = set()
        self.counts: Counter[str] = Counter()
        """`rounds`, `drafted` and `accepted` tokens, and `failed_drafts`."""

    def open(self, sequence_id: int) -> None:
        self._running.add(sequence_id)

    def close(self, sequence_id: int) -> None:
        self._running.discard(sequence_id)
        self._restart(self._traffic.close([sequence_id]))

    def depth(self, sequence_id: int, category: str, num_tokens: int, remaining: int, now: float) -> int:
        """Tokens to draft for the next round of this text, which may still have `remaining` tokens."""
        most = min(self.max_depth, remaining - 1)
        if most <= 0 or not self._is_enabled:
            return 0
        traffic = TrafficClass(METHOD, category)
        if self._calls.allow(_CALLS, now) == 0:
            self._traffic.count_decision(traffic, 0, False)
            return 0
        if self._policy.skip_step(1):
            self._traffic.count_declined([traffic])
            return 0
        is_allowed = self._traffic.breaker.allow(traffic, now) > 0
        candidate = DepthCandidate(sequence_id, traffic, most if is_allowed else 0, num_tokens, remaining)
        depth = self._policy.decide([candidate])[0]
        self._traffic.count_decision(traffic, depth, is_allowed)
        return depth

    def record_call(self, has_failed: bool, now: float) -> None:
        """Report a call of the draft endpoint. After a failure the next calls wait for the breaker's cool-down."""
        self.counts["failed_drafts"] += has_failed
        self._calls.record(_CALLS, 0, 0, now, gain=0.0 if has_failed else 2.0)

    def observe(
        self,
        round_: RoundObservation,
        draft_seconds: float,
        verify_seconds: float,
        context: int,
        now: float,
        is_first: bool,
    ) -> None:
        """Learn from a round. `is_first` says that its calls also computed the prompt."""
        self.counts.update(rounds=1, drafted=round_.drafted, accepted=round_.accepted)
        asked = round_.requested > 0
        self._totals.add(int(is_first), asked, draft_seconds, 0.0, verify_seconds)
        if asked:
            self._restart(self._traffic.observe([round_], now, self._policy.advantage))
        self._policy.observe(
            StepObservation(
                batch=1,
                rows=1 + round_.drafted,
                prefill_rows=int(is_first),
                drafting=(DraftingObservation(METHOD, round_.requested, draft_seconds),) if asked else (),
                verify_seconds=verify_seconds,
                network_seconds=0.0,
                rounds=(round_,) if asked else (),
                context=context,
                is_timed=not is_first,
            )
        )

    def status(self) -> EngineStatus:
        """Counts in the format of an engine, for the metrics that every server has."""
        return EngineStatus(
            running=len(self._running),
            waiting=0,
            kv_used=0,
            kv_total=1,
            preemptions=0,
            invalid_drafts=0,
            flags=SpeculationFlags(self._is_enabled, METHOD, self.max_depth),
            traffic=self._traffic.report(),
            advantage=self._policy.advantage,
            seconds=self._totals.seconds,
        )

    def _restart(self, changes: Iterable[AcceptanceChange]) -> None:
        for change in changes:
            self._policy.restart(change.traffic, change.after)

"""A circuit breaker per traffic class: after repeated loss, no drafts and no draft prefill until a probe succeeds.

    closed --(`trips` lossy windows in a row)--> open --(cool-down)--> half open --(one good window)--> closed
                                                  ^------------------(one lossy window)-----------------'

A window is `window` rounds. It is lossy if its mean measured `gain` over plain decoding is under 1; if the gain is not
known, if its acceptance is under `threshold`. Acceptance is alpha, accepted / tested: a threshold on accepted / drafted
means something else at every depth. Sixteen rounds contain about forty tested drafts. Three windows in a row under 0.4 do
not occur at alpha 0.7; at alpha 0.2 the breaker opens after 48 rounds.

The published rule, three low rounds in a row, is `BreakerRule(threshold, window=1, conditional=False)`.
"""

import sys
from dataclasses import dataclass

from paceline.core.errors import InvalidConfig
from paceline.core.status import BreakerState
from paceline.core.traffic import TrafficClass
from paceline.policy.depth.acceptance import known_positions

UNLIMITED = sys.maxsize


@dataclass(frozen=True, slots=True)
class BreakerRule:
    threshold: float = 0.4
    """Acceptance under which a window is lossy; `draft_acceptance_threshold` in the configuration."""
    trips: int = 3
    """Lossy windows in a row that open the breaker."""
    window: int = 16
    """Rounds of a window."""
    conditional: bool = True
    """Whether acceptance is alpha (accepted / tested); False: accepted / drafted, as in the published rule."""
    cooldown: float = 5.0
    """Seconds until a probe; they double with every failed probe, up to `max_cooldown`."""
    max_cooldown: float = 120.0
    probes: int = 1
    """Sequences that may draft while half open."""

    def __post_init__(self) -> None:
        checks = (
            ("draft_acceptance_threshold", 0.0 <= self.threshold <= 1.0, "in [0, 1]", self.threshold),
            ("trips", self.trips >= 1, "at least 1", self.trips),
            ("window", self.window >= 1, "at least 1", self.window),
            ("cooldown", 0.0 < self.cooldown <= self.max_cooldown, "over 0, at most max_cooldown", self.cooldown),
            ("probes", self.probes >= 1, "at least 1", self.probes),
        )
        for name, good, allowed, value in checks:
            if not good:
                raise InvalidConfig(f"{name} must be {allowed}, got {value!r}")


@dataclass(slots=True)
class _Circuit:
    cooldown: float
    state: BreakerState = BreakerState.CLOSED
    until: float = 0.0
    lossy: int = 0
    rounds: int = 0
    accepted: int = 0
    tested: int = 0
    gain: float = 0.0
    gains: int = 0

    def clear_window(self) -> None:
        self.rounds = self.accepted = self.tested = self.gains = 0
        self.gain = 0.0


class Breaker:
    """`allow` before drafting (and before a draft's prefill), `record` after verifying. Time comes from the caller."""

    def __init__(self, rule: BreakerRule | None = None) -> None:
        self._rule = rule or BreakerRule()
        self._circuits: dict[TrafficClass, _Circuit] = {}

    def allow(self, traffic: TrafficClass, now: float) -> int:
        """The number of sequences of the traffic class that may draft: all, a few to probe, or none."""
        circuit = self._circuit(traffic)
        if circuit.state is BreakerState.OPEN and now >= circuit.until:
            circuit.state = BreakerState.HALF_OPEN
            circuit.clear_window()
        if circuit.state is BreakerState.CLOSED:
            return UNLIMITED
        return self._rule.probes if circuit.state is BreakerState.HALF_OPEN else 0

    def record(self, traffic: TrafficClass, drafted: int, accepted: int, now: float, gain: float | None = None) -> None:
        """Count one round. `gain` is the measured speed of speculation over plain decoding. A round without drafts counts only
        with a gain: the policy then knew what drafts would cost and declined."""
        circuit = self._circuit(traffic)
        if circuit.state is BreakerState.OPEN or (drafted == 0 and gain is None):
            return
        circuit.rounds += 1
        circuit.accepted += accepted
        circuit.tested += known_positions(drafted, accepted) if self._rule.conditional else drafted
        if gain is not None:
            circuit.gain += gain
            circuit.gains += 1
        if circuit.rounds >= self._rule.window:
            self._judge(circuit, now)

    def reset(self, traffic: TrafficClass) -> None:
        """Close the breaker of the traffic class, as at the start."""
        self._circuits.pop(traffic, None)

    def state(self, traffic: TrafficClass) -> BreakerState:
        return self._circuit(traffic).state

    def _judge(self, circuit: _Circuit, now: float) -> None:
        if circuit.gains:
            is_lossy = circuit.gain < circuit.gains
        else:
            is_lossy = circuit.accepted < self._rule.threshold * circuit.tested
        circuit.clear_window()
        if not is_lossy:
            circuit.lossy = 0
            circuit.cooldown = self._rule.cooldown
            circuit.state = BreakerState.CLOSED
            return
        circuit.lossy += 1
        if circuit.state is BreakerState.HALF_OPEN:
            circuit.cooldown = min(self._rule.max_cooldown, 2.0 * circuit.cooldown)
        elif circuit.lossy < self._rule.trips:
            return
        circuit.state, circuit.lossy, circuit.until = BreakerState.OPEN, 0, now + circuit.cooldown

    def _circuit(self, traffic: TrafficClass) -> _Circuit:
        if traffic not in self._circuits:
            self._circuits[traffic] = _Circuit(self._rule.cooldown)
        return self._circuits[traffic]

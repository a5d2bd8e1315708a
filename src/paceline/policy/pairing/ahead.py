"""Decides what a draft worker drafts ahead: whether at all, how many outcomes, and which passes are worth their time.

`DraftingAhead` decides whether to draft ahead: the passes saved against the passes delayed. Of a draft of K tokens, `num_ready`
had been drafted when the target requested it: passes saved. A pass begun ahead must end before a requested one can start:
`delay` passes lost. That is about half a pass on a device of its own, and many where the target occupies the device. Over
recent rounds drafting ahead pays if

    sum num_ready  >=  max(sum delay, MIN_READY_SHARE sum K)

Otherwise the worker drafts on demand, and drafts ahead for a few rounds at an interval to measure again.

`BranchBudget` decides how many outcomes to prepare for each sequence: as many as save most passes on demand. A pass over r rows
takes t(r) = t0 + t1 r, fitted to recent passes. With S sequences and n branches each, the pause between an answer and the
target's next request has room for m = PAUSE_SHARE pause / t(n S) passes. Every token of a draft of K tokens that is ready then
saves a pass that the target would wait for. With p_i the probability of outcome i, n maximizes

    p_1 min(K, m - 1) + sum_{1 < i <= n} p_i min(K, m)

where the first outcome is full acceptance: the token that follows it takes a pass of its own. On a GPU rows cost little, so
that n is large; on cores of a host a row costs a good part of a pass, and many incomplete drafts may be better than few
complete ones. With several sequences all drafts have to be complete: the target waits for the last of them.

`TargetTokenRate` is the tokens per second of a target's sequences, as its draft worker sees them: what a pass of the draft has
to earn. While a target waits, one more pass takes t seconds and adds a token that is accepted with probability S, the product
of the acceptance of all tokens up to it. A sequence that makes r tokens per second makes r t tokens in that time. The pass pays
if

    S  >=  r t
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from paceline.policy.cost.curve import DecayingMean, LinearFit

MIN_READY_SHARE = 0.05
"""Share of the requested tokens that must be ready even without delays. Passes take power and slow a target on the same device,
which is not measured here."""
WINDOW = 64.0
"""Rounds that the decaying sums of `DraftingAhead` cover."""
MIN_ROUNDS = 32.0
"""Rounds in the sums before drafting ahead may pause."""
PROBE_ROUNDS, PROBE_INTERVAL = 4, 400
"""While paused, rounds drafted ahead out of each interval of rounds."""
MAX_DELAY = 2.0
"""Upper bound of a round's delay, in drafts on demand: one outlier does not outweigh the window."""


@dataclass(frozen=True, slots=True)
class AheadRound:
    """A round that was drafted ahead, at the time the target requested it; means over its sequences."""

    depth: float
    num_ready: float
    """Tokens drafted ahead."""
    ready_share: float
    """Share of drafts that were complete."""
    delay: float = 0.0
    """Wait for a pass begun ahead, in passes on demand."""


class DraftingAhead:
    """The decision for one target: `observe` each round drafted ahead, then call `next_round`."""

    __slots__ = ("_delay", "_depth", "_num_ready", "_passed", "_paused_share", "_ready_share", "_rounds")

    def __init__(self) -> None:
        self._paused_share: float | None = None
        self._passed = 0
        self._reset()

    def _reset(self) -> None:
        self._rounds = self._depth = self._num_ready = self._ready_share = self._delay = 0.0

    @property
    def paused_share(self) -> float | None:
        """Share of drafts that were ready in the last measurement; None while it drafts ahead."""
        return self._paused_share

    def observe(self, round_: AheadRound) -> None:
        keep = 1.0 - 1.0 / WINDOW
        self._rounds = self._rounds * keep + 1.0
        self._depth = self._depth * keep + round_.depth
        self._num_ready = self._num_ready * keep + round_.num_ready
        self._ready_share = self._ready_share * keep + round_.ready_share
        self._delay = self._delay * keep + min(round_.delay, MAX_DELAY * round_.depth)

    def next_round(self) -> bool:
        """Whether to draft ahead for the next round."""
        if self._paused_share is None:
            if self._rounds < MIN_ROUNDS or self._pays:
                return True
            self._pause()
        elif self._passed == PROBE_INTERVAL:
            if self._rounds and self._pays:
                self._paused_share = None
                return True
            self._pause()
        self._passed += 1
        return self._passed > PROBE_INTERVAL - PROBE_ROUNDS

    @property
    def _pays(self) -> bool:
        return self._num_ready >= max(self._delay, MIN_READY_SHARE * self._depth)

    def _pause(self) -> None:
        if self._rounds:
            self._paused_share = self._ready_share / self._rounds
        self._passed = 0
        self._reset()


BUDGET_WINDOW = 256.0
"""Passes that the fit of `BranchBudget` covers."""
MIN_PASSES = 8.0
"""Passes in the fit of `BranchBudget` before it is used."""
PAUSE_SHARE = 0.85
"""Share of a pause that passes may fill: the worker schedules and answers between them, and times vary."""
NUM_PAUSES = 16
"""Pauses of which the median counts: a target without requests makes a long one."""


class BranchBudget:
    """The decision for all targets of one worker."""

    def __init__(self) -> None:
        self._passes = LinearFit(1.0 - 1.0 / BUDGET_WINDOW)
        """Seconds of passes by their rows."""
        self._pauses: deque[float] = deque(maxlen=NUM_PAUSES)

    def observe_pass(self, rows: int, seconds: float) -> None:
        self._passes.add(rows, seconds)

    def observe_pause(self, seconds: float) -> None:
        """Time between an answer and the next request of its target."""
        self._pauses.append(seconds)

    @property
    def is_known(self) -> bool:
        """Whether `pass_seconds` rests on enough passes."""
        return self._passes.n >= MIN_PASSES

    def pass_seconds(self, rows: int) -> float:
        """Expected time of a pass over `rows` rows."""
        # Without passes of different sizes rows count as free until larger passes show their cost
        return self._passes.at(rows, min_variance=0.25)

    def num_branches(self, depth: int, sequences: int, probabilities: Sequence[float]) -> int:
        """Number of branches for each sequence. `probabilities` are those of their outcomes: first the draft's own
        continuation, then the alternatives, most probable first. All branches are drafted until enough was observed."""
        if not self.is_known or not self._pauses:
            return len(probabilities)
        time, own, others = PAUSE_SHARE * median(self._pauses), probabilities[0], 0.0
        best, best_saved = 1, 0.0
        for count, probability in enumerate(probabilities, start=1):
            others += probability if count > 1 else 0.0
            seconds = self.pass_seconds(count * sequences)
            passes = 0.0 if seconds > time else time / max(1e-9, seconds)
            if sequences > 1 and passes < depth + 1:
                break  # the target waits for the last of its sequences: a part of a draft saves little
            saved = own * min(depth, max(0.0, passes - 1.0)) + others * min(depth, passes)
            if saved > best_saved:
                best, best_saved = count, saved
        return best


RATE_WINDOW = 32.0
"""Rounds that the rate of `TargetTokenRate` covers."""
RATE_MIN_ROUNDS = 8.0
"""Rounds before the rate of `TargetTokenRate` is used."""
_KEEP = 1.0 - 1.0 / RATE_WINDOW


class TargetTokenRate:
    """The rate of one target, per sequence."""

    __slots__ = ("_last", "_rate", "_rounds")

    def __init__(self) -> None:
        self._rounds, self._rate = 0.0, DecayingMean(keep=_KEEP)
        self._last: float | None = None

    def observe(self, tokens: float, now: float) -> None:
        """Count a request for drafts. `tokens` is the mean over its sequences of the tokens committed since the last
        request."""
        last, self._last = self._last, now
        if last is None or tokens <= 0.0:
            return
        self._rounds = self._rounds * _KEEP + 1.0
        self._rate.add(tokens, now - last)

    def is_worth_waiting(self, survival: float, seconds: float) -> bool:
        """Whether a target should wait `seconds` for a token that is accepted with probability `survival`. It should while
        its rate is not known."""
        if self._rounds < RATE_MIN_ROUNDS or self._rate.weight <= 0.0:
            return True
        return survival >= self._rate.value(0.0) * seconds

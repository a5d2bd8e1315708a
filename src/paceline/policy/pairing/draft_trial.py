"""Decides by a sequential test of their goodput whether a new draft replaces the current one. The functions are pure.

Goodput is tokens per second of decoding. The current or the new draft, chosen at random, drafts for each sequence, which yields
a pair of tokens and seconds. Inside one engine, where only one draft is in use at a time, the unit is a period instead: see
`worker/server/draft_swap.py`.

The gain is the logarithm of the ratio of the two goodputs, with its variance s^2 by the delta method. The test may be repeated
at any time without more errors (mixture sequential probability ratio test, Johari et al. 2017):

    L = sqrt(s^2 / (s^2 + tau^2)) exp(gain^2 tau^2 / (2 s^2 (s^2 + tau^2)))  >=  1 / alpha
"""

import math
from dataclasses import dataclass
from enum import Enum

from paceline.core.status import GoodputSums

TRIAL_SHARE = 0.25
"""Share of the sequences that a draft on trial gets."""


class TrialVerdict(Enum):
    CONTINUE = "continue"
    KEEP = "keep"
    ROLL_BACK = "roll back"


@dataclass(frozen=True, slots=True)
class TrialLimits:
    seconds: float = 600.0
    """Time after which a draft without a proven gain is rolled back."""
    min_sequences: int = 20
    """Sequences, or other units, of each draft before the first test: the variance must be known."""
    alpha: float = 0.005
    """Most probable rate of wrong decisions between two equal drafts."""
    usual_gain: float = 0.1
    """Scale tau of the gains that the test finds soonest, as a logarithm."""
    unit: str = "sequences"
    """What one pair of tokens and seconds was measured on, for messages."""


@dataclass(frozen=True, slots=True)
class TrialDecision:
    verdict: TrialVerdict
    gain: float | None
    """Relative gain in goodput, 0.1 for 10% more. None if there were not enough sequences."""
    reason: str


USED_AT_ONCE = TrialDecision(TrialVerdict.KEEP, None, "used at once, without a trial")


class DraftTrial:
    """The trial of one draft, from `started` on. `decide` has no effects."""

    def __init__(self, started: float, limits: TrialLimits | None = None) -> None:
        self._started, self._limits = started, limits or TrialLimits()

    def decide(self, current: GoodputSums, candidate: GoodputSums, now: float) -> TrialDecision:
        """Decides from `current` and `candidate`, the sums over each draft's sequences since the start of the trial."""
        limits = self._limits
        seen = f"{candidate.sequences} {limits.unit} against {current.sequences}"
        is_over = now - self._started >= limits.seconds
        if min(current.sequences, candidate.sequences) < limits.min_sequences or not current.tokens:
            if is_over:
                text = f"only {seen} within {limits.seconds:g} s, and {limits.min_sequences} of each are needed"
                return TrialDecision(TrialVerdict.ROLL_BACK, None, text)
            text = f"waiting for traffic: {seen}, of at least {limits.min_sequences} each within {limits.seconds:g} s"
            return TrialDecision(TrialVerdict.CONTINUE, None, text)
        gain = math.log(candidate.goodput / current.goodput)
        variance = _log_variance(current) + _log_variance(candidate)
        relative = math.expm1(gain)
        text = f"{relative:+.1%} goodput, {seen}"
        if _log_likelihood_ratio(gain, variance, limits.usual_gain) >= -math.log(limits.alpha):
            verdict = TrialVerdict.KEEP if gain > 0.0 else TrialVerdict.ROLL_BACK
            return TrialDecision(verdict, relative, text)
        if is_over:
            return TrialDecision(TrialVerdict.ROLL_BACK, relative, f"{text}: not certain within {limits.seconds:g} s")
        return TrialDecision(TrialVerdict.CONTINUE, relative, text)


def _log_variance(sums: GoodputSums) -> float:
    """Variance of the logarithm of tokens / seconds, by the delta method over sequences."""
    count, ratio = sums.sequences, sums.goodput
    residual = sums.tokens_squared - 2.0 * ratio * sums.product + ratio * ratio * sums.seconds_squared
    return max(residual, 1e-12) * count / (count - 1) / (sums.tokens * sums.tokens)


def _log_likelihood_ratio(gain: float, variance: float, tau: float) -> float:
    total = variance + tau * tau
    return 0.5 * math.log(variance / total) + gain * gain * tau * tau / (2.0 * variance * total)

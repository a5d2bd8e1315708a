"""A worse draft is never kept; a better one almost always is. Rounds are simulated, time is given."""

import math
import random

import pytest

from paceline.core.status import GoodputSums
from paceline.policy.pairing.draft_trial import DraftTrial, TrialDecision, TrialLimits, TrialVerdict

STEP = 0.03
DEPTH = 4
TRIALS = 40


def sequence(rng: random.Random, alpha: float, wait: float) -> tuple[float, float]:
    """Tokens and seconds of a sequence: rounds of a draft with about this alpha, that a target waits `wait` seconds for."""
    own = min(0.98, max(0.02, rng.gauss(alpha, 0.08)))  # texts differ
    rounds, log_alpha = rng.randint(4, 12), math.log(own)
    tokens = sum(1 + min(DEPTH, int(math.log(1.0 - rng.random()) / log_alpha)) for _ in range(rounds))
    seconds = sum(STEP * rng.uniform(0.9, 1.3) + wait * rng.random() * 2.0 for _ in range(rounds))
    return tokens, seconds


def trial(seed: int, old: tuple[float, float], new: tuple[float, float], most: int = 1200) -> tuple[TrialDecision, int]:
    """The decision of a trial with both drafts' alpha and wait, and the number of sequences that it took."""
    rng = random.Random(seed)
    run = DraftTrial(0.0, TrialLimits(seconds=float(most)))
    current = candidate = GoodputSums()
    for count in range(1, most + 2):
        if rng.random() < 0.25:
            candidate = candidate.with_sequence(*sequence(rng, *new))
        else:
            current = current.with_sequence(*sequence(rng, *old))
        if count % 5 == 0:
            decision = run.decide(current, candidate, float(count))
            if decision.verdict is not TrialVerdict.CONTINUE:
                return decision, count
    return run.decide(current, candidate, float(most)), most


WORSE = [((0.7, 0.0), (0.65, 0.0)), ((0.7, 0.0), (0.4, 0.0)), ((0.7, 0.0), (0.7, 0.004)), ((0.6, 0.01), (0.63, 0.02))]
BETTER = [((0.6, 0.0), (0.7, 0.0)), ((0.5, 0.0), (0.8, 0.0)), ((0.7, 0.008), (0.7, 0.0))]


@pytest.mark.parametrize(("old", "new"), WORSE)
def test_worse_draft_is_never_kept(old: tuple[float, float], new: tuple[float, float]) -> None:
    verdicts = [trial(seed, old, new)[0].verdict for seed in range(TRIALS)]
    assert verdicts == [TrialVerdict.ROLL_BACK] * TRIALS


@pytest.mark.parametrize(("old", "new"), BETTER)
def test_better_draft_is_kept(old: tuple[float, float], new: tuple[float, float]) -> None:
    kept = [trial(seed, old, new)[0].verdict is TrialVerdict.KEEP for seed in range(TRIALS)]
    assert sum(kept) > 0.95 * len(kept)


def test_equal_draft_is_rolled_back() -> None:
    verdicts = [trial(seed, (0.7, 0.0), (0.7, 0.0), most=600)[0].verdict for seed in range(TRIALS)]
    assert verdicts.count(TrialVerdict.KEEP) <= 1  # alpha is 0.005


def test_large_difference_is_decided_soon() -> None:
    for seed in range(10):
        better, count = trial(seed, (0.4, 0.0), (0.8, 0.0))
        assert better.verdict is TrialVerdict.KEEP
        assert better.gain is not None
        assert better.gain > 0.3
        assert count < 200


def test_no_decision_before_both_drafts_have_enough_sequences() -> None:
    run, many = DraftTrial(100.0, TrialLimits(seconds=50.0)), GoodputSums()
    for _ in range(500):
        many = many.with_sequence(40.0, 1.0).with_sequence(41.0, 1.0)
    few = GoodputSums()
    for i in range(19):
        few = few.with_sequence(80.0 + i % 2, 1.0)
    assert run.decide(many, few, 149.0).verdict is TrialVerdict.CONTINUE
    late = run.decide(many, few, 150.0)
    assert (late.verdict, late.gain) == (TrialVerdict.ROLL_BACK, None)
    assert "20 of each are needed" in late.reason
    assert run.decide(many, few.with_sequence(80.0, 1.0), 149.0).verdict is TrialVerdict.KEEP


def test_sums_since_a_start() -> None:
    before = GoodputSums().with_sequence(10.0, 2.0)
    after = before.with_sequence(30.0, 4.0)
    assert after.since(before) == GoodputSums().with_sequence(30.0, 4.0)
    assert before.since(after) == before, "the worker restarted"
    assert math.isclose(after.goodput, 40.0 / 6.0)

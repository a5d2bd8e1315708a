"""Rounds are simulated: a worker drafts ahead while a target verifies, pass after pass, and is asked in the midst of one."""

import random
from dataclasses import dataclass

import pytest

from paceline.cluster.pairing.ahead import PROBE_INTERVAL, PROBE_ROUNDS, WINDOW, AheadRound, DraftingAhead

DEPTH = 5
MISS = AheadRound(DEPTH, 0.0, 0.0)
READY = AheadRound(DEPTH, DEPTH, 1.0)


@dataclass(frozen=True)
class Place:
    """Milliseconds of a verification alone and beside drafting, and of a pass on demand and beside verification."""

    verify: float
    verify_beside: float
    asked: float
    beside: float


PROCESSES_ON_ONE_GPU = Place(21.1, 26.95, 1.05, 12.42)
STREAMS_ON_ONE_GPU = Place(21.0, 21.3, 0.95, 68.4)
OWN_DEVICE = Place(21.0, 21.0, 1.0, 1.0)
SLOW_DRAFT = Place(21.0, 21.0, 6.0, 6.0)
WIDE_PASSES = Place(21.0, 21.0, 1.5, 3.0)


def run(place, foreseen, decide, rounds=4000, observe=lambda asked: None):
    """Milliseconds in all, and the rounds that were drafted ahead for."""
    rng, total, num_ahead = random.Random(1), 0.0, 0
    for _ in range(rounds):
        if not decide():
            total += place.verify + DEPTH * place.asked
            continue
        num_ahead += 1
        verify = place.verify_beside * rng.uniform(0.9, 1.1)
        made = min(2 * DEPTH + 1, int(verify / place.beside))
        is_busy = made < 2 * DEPTH + 1
        rest = min(place.beside, (made + 1) * place.beside - verify) if is_busy else 0.0
        there = min(DEPTH, max(0, made - 1)) if rng.random() < foreseen else 0
        total += verify + rest + (DEPTH - there) * place.asked
        observe(AheadRound(DEPTH, there, float(there == DEPTH), 0.5 * place.beside / place.asked if is_busy else 0.0))
    return total, num_ahead


def three(place, foreseen):
    """Ahead, on demand, and as decided."""
    policy = DraftingAhead()
    ahead, _ = run(place, foreseen, lambda: True)
    on_demand, _ = run(place, foreseen, lambda: False)
    decided, num_ahead = run(place, foreseen, policy.next_round, observe=policy.observe)
    return ahead, on_demand, decided, num_ahead, policy


@pytest.mark.parametrize("place", [PROCESSES_ON_ONE_GPU, STREAMS_ON_ONE_GPU])
@pytest.mark.parametrize("foreseen", [0.6, 0.97])
def test_on_the_targets_device_it_stops(place, foreseen):
    ahead, on_demand, decided, num_ahead, policy = three(place, foreseen)
    assert ahead > 1.1 * on_demand
    assert decided < 1.05 * on_demand
    assert policy.resting is not None
    assert policy.resting < 0.03
    assert num_ahead < WINDOW + 4000 * PROBE_ROUNDS / PROBE_INTERVAL


@pytest.mark.parametrize(
    ("place", "foreseen"),
    [(OWN_DEVICE, 0.2), (OWN_DEVICE, 0.6), (OWN_DEVICE, 0.97), (WIDE_PASSES, 0.6), (WIDE_PASSES, 0.97)],
)
def test_where_it_pays_it_is_never_interrupted(place, foreseen):
    ahead, on_demand, decided, num_ahead, policy = three(place, foreseen)
    assert (decided, num_ahead, policy.resting) == (ahead, 4000, None)
    assert decided < on_demand


@pytest.mark.parametrize("foreseen", [0.1, 0.2, 0.3])
def test_where_there_is_little_in_it_little_is_lost(foreseen):
    ahead, on_demand, decided, *_ = three(WIDE_PASSES, foreseen)
    assert decided < 1.02 * min(ahead, on_demand)


def test_drafts_that_are_never_complete_may_pay_all_the_same():
    ahead, on_demand, decided, _, policy = three(SLOW_DRAFT, 0.7)
    assert decided == ahead < on_demand
    assert policy.resting is None


def test_what_never_hits_is_given_up_even_if_it_delays_nobody():
    policy = DraftingAhead()
    _, num_ahead = run(OWN_DEVICE, 0.0, policy.next_round, observe=policy.observe)
    assert policy.resting == 0.0
    assert num_ahead < WINDOW + 4000 * PROBE_ROUNDS / PROBE_INTERVAL


def test_a_few_misses_are_not_enough():
    policy = DraftingAhead()
    for _ in range(31):
        assert policy.next_round()
        policy.observe(MISS)
    assert policy.resting is None


def given_up():
    policy = DraftingAhead()
    while policy.next_round():
        policy.observe(MISS)
    return policy


def test_at_rest_a_bounded_share_of_rounds_is_tried():
    policy = given_up()
    tried = []
    for _ in range(10 * PROBE_INTERVAL):
        tried.append(policy.next_round())
        if tried[-1]:
            policy.observe(MISS)
    assert sum(tried) == 10 * PROBE_ROUNDS


def test_a_probe_that_shows_nothing_ends():
    """No round of it followed on an answer: requests of one round each."""
    policy = given_up()
    assert sum(policy.next_round() for _ in range(10 * PROBE_INTERVAL)) == 10 * PROBE_ROUNDS
    assert policy.resting == 0.0


def test_it_is_taken_up_again_when_hits_return_and_given_up_again_when_they_end():
    policy = given_up()
    rounds = 0
    while policy.resting is not None:
        rounds += 1
        if policy.next_round():
            policy.observe(READY)
    assert rounds <= PROBE_INTERVAL + 1
    for _ in range(1000):
        assert policy.next_round()
        policy.observe(READY)
    misses = 0
    while policy.next_round():
        policy.observe(MISS)
        misses += 1
    assert WINDOW < misses < 4 * WINDOW, "a good past counts, and is forgotten"


def test_one_hiccup_does_not_decide():
    policy = DraftingAhead()
    for i in range(200):
        assert policy.next_round()
        policy.observe(AheadRound(DEPTH, 3.0, 0.6, 1e6 if i % 40 == 20 else 0.5))
    assert policy.resting is None

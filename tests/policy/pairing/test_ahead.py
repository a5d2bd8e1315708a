"""Drafting ahead in a simulation: the worker drafts pass after pass while the target verifies."""

import random
from dataclasses import dataclass

import pytest

from paceline.policy.pairing.ahead import PROBE_INTERVAL, PROBE_ROUNDS, WINDOW, AheadRound, DraftingAhead

DEPTH = 5
MISS = AheadRound(DEPTH, 0.0, 0.0)
READY = AheadRound(DEPTH, DEPTH, 1.0)


@dataclass(frozen=True)
class Setup:
    """Milliseconds of a verification without and with concurrent drafting, and of a draft pass on demand and during it."""

    verify: float
    verify_beside: float
    asked: float
    beside: float


PROCESSES_ON_ONE_GPU = Setup(21.1, 26.95, 1.05, 12.42)
STREAMS_ON_ONE_GPU = Setup(21.0, 21.3, 0.95, 68.4)
OWN_DEVICE = Setup(21.0, 21.0, 1.0, 1.0)
SLOW_DRAFT = Setup(21.0, 21.0, 6.0, 6.0)
WIDE_PASSES = Setup(21.0, 21.0, 1.5, 3.0)


def run(setup, foreseen, decide, rounds=4000, observe=lambda asked: None):
    """Total milliseconds, and the number of rounds drafted ahead."""
    rng, total, num_ahead = random.Random(1), 0.0, 0
    for _ in range(rounds):
        if not decide():
            total += setup.verify + DEPTH * setup.asked
            continue
        num_ahead += 1
        verify = setup.verify_beside * rng.uniform(0.9, 1.1)
        made = min(2 * DEPTH + 1, int(verify / setup.beside))
        is_busy = made < 2 * DEPTH + 1
        rest = min(setup.beside, (made + 1) * setup.beside - verify) if is_busy else 0.0
        there = min(DEPTH, max(0, made - 1)) if rng.random() < foreseen else 0
        total += verify + rest + (DEPTH - there) * setup.asked
        observe(AheadRound(DEPTH, there, float(there == DEPTH), 0.5 * setup.beside / setup.asked if is_busy else 0.0))
    return total, num_ahead


def compare(setup, foreseen):
    """Results of drafting ahead, on demand, and by the policy."""
    policy = DraftingAhead()
    ahead, _ = run(setup, foreseen, lambda: True)
    on_demand, _ = run(setup, foreseen, lambda: False)
    decided, num_ahead = run(setup, foreseen, policy.next_round, observe=policy.observe)
    return ahead, on_demand, decided, num_ahead, policy


@pytest.mark.parametrize("setup", [PROCESSES_ON_ONE_GPU, STREAMS_ON_ONE_GPU])
@pytest.mark.parametrize("foreseen", [0.6, 0.97])
def test_it_stops_on_the_device_of_the_target(setup, foreseen):
    ahead, on_demand, decided, num_ahead, policy = compare(setup, foreseen)
    assert ahead > 1.1 * on_demand
    assert decided < 1.05 * on_demand
    assert policy.paused_share is not None
    assert policy.paused_share < 0.03
    assert num_ahead < WINDOW + 4000 * PROBE_ROUNDS / PROBE_INTERVAL


@pytest.mark.parametrize(
    ("setup", "foreseen"),
    [(OWN_DEVICE, 0.2), (OWN_DEVICE, 0.6), (OWN_DEVICE, 0.97), (WIDE_PASSES, 0.6), (WIDE_PASSES, 0.97)],
)
def test_it_continues_where_it_pays(setup, foreseen):
    ahead, on_demand, decided, num_ahead, policy = compare(setup, foreseen)
    assert (decided, num_ahead, policy.paused_share) == (ahead, 4000, None)
    assert decided < on_demand


@pytest.mark.parametrize("foreseen", [0.1, 0.2, 0.3])
def test_loss_is_small_where_the_gain_is_small(foreseen):
    ahead, on_demand, decided, *_ = compare(WIDE_PASSES, foreseen)
    assert decided < 1.02 * min(ahead, on_demand)


def test_incomplete_drafts_can_pay():
    ahead, on_demand, decided, _, policy = compare(SLOW_DRAFT, 0.7)
    assert decided == ahead < on_demand
    assert policy.paused_share is None


def test_it_stops_without_hits_even_without_delay():
    policy = DraftingAhead()
    _, num_ahead = run(OWN_DEVICE, 0.0, policy.next_round, observe=policy.observe)
    assert policy.paused_share == 0.0
    assert num_ahead < WINDOW + 4000 * PROBE_ROUNDS / PROBE_INTERVAL


def test_few_misses_do_not_stop_it():
    policy = DraftingAhead()
    for _ in range(31):
        assert policy.next_round()
        policy.observe(MISS)
    assert policy.paused_share is None


def stopped():
    policy = DraftingAhead()
    while policy.next_round():
        policy.observe(MISS)
    return policy


def test_probes_are_a_bounded_share_of_rounds():
    policy = stopped()
    tried = []
    for _ in range(10 * PROBE_INTERVAL):
        tried.append(policy.next_round())
        if tried[-1]:
            policy.observe(MISS)
    assert sum(tried) == 10 * PROBE_ROUNDS


def test_probe_without_observations_ends():
    """Requests of a single round each: no probed round has a predecessor."""
    policy = stopped()
    assert sum(policy.next_round() for _ in range(10 * PROBE_INTERVAL)) == 10 * PROBE_ROUNDS
    assert policy.paused_share == 0.0


def test_it_resumes_with_hits_and_stops_without():
    policy = stopped()
    rounds = 0
    while policy.paused_share is not None:
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
    assert WINDOW < misses < 4 * WINDOW, "older rounds count less"


def test_single_outliers_do_not_stop_it():
    policy = DraftingAhead()
    for i in range(200):
        assert policy.next_round()
        policy.observe(AheadRound(DEPTH, 3.0, 0.6, 1e6 if i % 40 == 20 else 0.5))
    assert policy.paused_share is None

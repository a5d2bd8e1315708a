"""Which prompts are computed elsewhere: by length at first, then by what it takes here and there."""

import pytest

from paceline.cluster.routing.handoff import (
    FRESH_SECONDS,
    LEAST_PATIENCE,
    MOST_PATIENCE,
    Handoff,
    HandoffPolicy,
    Here,
    PrefillLoad,
)
from paceline.core.clock import VirtualClock

IDLE = PrefillLoad("p-0", 0)


def here(uncached: int, queued: int = 0, running: int = 0) -> Here:
    return Here(uncached, queued, running, uncached + 100)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1000.0)


@pytest.fixture
def policy(clock: VirtualClock) -> HandoffPolicy:
    return HandoffPolicy(clock)


def test_unmeasured_the_threshold_decides(policy: HandoffPolicy) -> None:
    assert policy.choose(here(512), [IDLE]) is None
    assert policy.choose(here(513), [IDLE]) == Handoff("p-0", MOST_PATIENCE)
    assert policy.choose(here(513), []) is None


def test_one_side_measured_is_not_enough(policy: HandoffPolicy) -> None:
    policy.computed_here(1000, 1e-3)  # as if nothing could be faster than here
    assert policy.choose(here(513), [IDLE]) is not None


def test_measured_the_sooner_first_token_decides(policy: HandoffPolicy) -> None:
    policy.computed_here(1000, 1.0)
    policy.handed_over("p-0", 1000, 2.0)
    assert policy.choose(here(4000), [IDLE]) is None
    assert policy.choose(here(4000, queued=5000), [IDLE]) is not None  # here it would wait longer
    assert policy.choose(here(4000, queued=5000), [PrefillLoad("p-0", 1000)]) is None


def test_streams_that_would_be_held_up_count(policy: HandoffPolicy) -> None:
    policy.computed_here(1000, 1.0)
    policy.handed_over("p-0", 1000, 2.0)
    assert policy.choose(here(1000, running=0), [IDLE]) is None
    assert policy.choose(here(1000, running=1), [IDLE]) is None
    assert policy.choose(here(1000, running=2), [IDLE]) is not None


def test_a_faster_prefill_worker_moves_the_threshold_down(policy: HandoffPolicy) -> None:
    policy.computed_here(1000, 1.0)
    policy.handed_over("p-0", 1000, 0.1)
    near, far = PrefillLoad("p-0", 0, 0.01), PrefillLoad("p-0", 0, 0.05)
    assert policy.choose(here(100), [near]) is not None
    assert policy.choose(here(100), [far]) is None
    assert policy.choose(here(63, queued=10_000), [near]) is None  # too short to be worth anything


def test_what_was_not_measured_of_late_is_tried_again(policy: HandoffPolicy, clock: VirtualClock) -> None:
    policy.computed_here(1000, 1.0)
    policy.handed_over("p-0", 1000, 9.0)
    assert policy.choose(here(1000), [IDLE]) is None
    clock.advance(FRESH_SECONDS)
    policy.computed_here(1000, 1.0)
    assert policy.choose(here(1000), [IDLE]) is not None


def test_the_least_busy_and_fastest_worker_is_asked(policy: HandoffPolicy) -> None:
    assert policy.choose(here(600), [PrefillLoad("a", 900), PrefillLoad("b", 100)]) == Handoff("b", MOST_PATIENCE)
    policy.handed_over("a", 1000, 0.1)
    policy.handed_over("b", 1000, 1.0)
    chosen = policy.choose(here(600), [PrefillLoad("a", 900), PrefillLoad("b", 100)])
    assert chosen == Handoff("a", LEAST_PATIENCE)
    # One that nobody has measured is taken for a fast one
    chosen = policy.choose(here(600), [PrefillLoad("a", 900), PrefillLoad("b", 0), PrefillLoad("new", 100)])
    assert chosen is not None
    assert chosen.worker == "new"


def test_prompts_beyond_its_window_are_not_offered_to_a_worker(policy: HandoffPolicy) -> None:
    small = PrefillLoad("small", 0, window=701)
    assert policy.choose(here(600), [small]) is not None
    assert policy.choose(here(601), [small]) is None


def test_patience_goes_by_what_it_should_take(policy: HandoffPolicy) -> None:
    policy.handed_over("p-0", 1000, 5.0)
    chosen = policy.choose(here(1000, running=9), [IDLE])
    assert chosen == Handoff("p-0", 20.0)


def test_a_worker_that_failed_is_left_alone_longer_each_time(policy: HandoffPolicy, clock: VirtualClock) -> None:
    waits = []
    for _ in range(3):
        for _ in range(5):  # one death, five prompts
            policy.failed("p-0")
        waited = 0.0
        while policy.choose(here(600), [IDLE]) is None:
            clock.advance(0.25)
            waited += 0.25
        waits.append(waited)
    assert waits == [0.5, 1.0, 2.0]
    policy.handed_over("p-0", 600, 0.1)
    policy.failed("p-0")
    clock.advance(0.5)
    assert policy.choose(here(600), [IDLE]) is not None
    policy.failed("p-0")
    assert policy.choose(here(600), [IDLE, PrefillLoad("p-1", 10_000)]) == Handoff("p-1", MOST_PATIENCE)


def test_short_measurements_are_not_believed(policy: HandoffPolicy) -> None:
    policy.computed_here(10, 5.0)
    policy.handed_over("p-0", 1000, 1.0)
    assert policy.choose(here(400), [IDLE]) is None


def test_a_threshold_of_ones_own(clock: VirtualClock) -> None:
    policy = HandoffPolicy(clock, threshold=20)
    assert policy.choose(here(20), [IDLE]) is None
    assert policy.choose(here(21), [IDLE]) is not None

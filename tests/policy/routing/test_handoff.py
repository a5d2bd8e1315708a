"""Which prompts are handed off: by length at first, then by measured rates."""

import pytest

from paceline.core.clock import VirtualClock
from paceline.policy.routing.handoff import (
    FRESH_SECONDS,
    MAX_TIMEOUT,
    MIN_TIMEOUT,
    Handoff,
    HandoffPolicy,
    LocalPrompt,
    PrefillLoad,
)

NOW = 0.0
IDLE = PrefillLoad("p-0", 0)


def prompt(uncached: int, queued: int = 0, running: int = 0) -> LocalPrompt:
    return LocalPrompt(uncached, queued, running, uncached + 100)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1000.0)


@pytest.fixture
def policy() -> HandoffPolicy:
    return HandoffPolicy()


def test_threshold_decides_without_measurements(policy: HandoffPolicy) -> None:
    assert policy.choose(prompt(512), [IDLE], NOW) is None
    assert policy.choose(prompt(513), [IDLE], NOW) == Handoff("p-0", MAX_TIMEOUT)
    assert policy.choose(prompt(513), [], NOW) is None


def test_threshold_decides_with_one_rate_measured(policy: HandoffPolicy) -> None:
    policy.add_local(1000, 1e-3, NOW)  # very fast
    assert policy.choose(prompt(513), [IDLE], NOW) is not None


def test_earlier_first_token_decides_with_measurements(policy: HandoffPolicy) -> None:
    policy.add_local(1000, 1.0, NOW)
    policy.add_handoff("p-0", 1000, 2.0, NOW)
    assert policy.choose(prompt(4000), [IDLE], NOW) is None
    assert policy.choose(prompt(4000, queued=5000), [IDLE], NOW) is not None  # it would wait longer
    assert policy.choose(prompt(4000, queued=5000), [PrefillLoad("p-0", 1000)], NOW) is None


def test_delay_of_running_sequences_counts(policy: HandoffPolicy) -> None:
    policy.add_local(1000, 1.0, NOW)
    policy.add_handoff("p-0", 1000, 2.0, NOW)
    assert policy.choose(prompt(1000, running=0), [IDLE], NOW) is None
    assert policy.choose(prompt(1000, running=1), [IDLE], NOW) is None
    assert policy.choose(prompt(1000, running=2), [IDLE], NOW) is not None


def test_fast_prefill_worker_takes_shorter_prompts(policy: HandoffPolicy) -> None:
    policy.add_local(1000, 1.0, NOW)
    policy.add_handoff("p-0", 1000, 0.1, NOW)
    near, far = PrefillLoad("p-0", 0, 0.01), PrefillLoad("p-0", 0, 0.05)
    assert policy.choose(prompt(100), [near], NOW) is not None
    assert policy.choose(prompt(100), [far], NOW) is None
    assert policy.choose(prompt(63, queued=10_000), [near], NOW) is None  # too short


def test_old_measurement_is_repeated(policy: HandoffPolicy, clock: VirtualClock) -> None:
    policy.add_local(1000, 1.0, clock.now())
    policy.add_handoff("p-0", 1000, 9.0, clock.now())
    assert policy.choose(prompt(1000), [IDLE], clock.now()) is None
    clock.advance(FRESH_SECONDS)
    policy.add_local(1000, 1.0, clock.now())
    assert policy.choose(prompt(1000), [IDLE], clock.now()) is not None


def test_fastest_worker_is_chosen(policy: HandoffPolicy) -> None:
    assert policy.choose(prompt(600), [PrefillLoad("a", 900), PrefillLoad("b", 100)], NOW) == Handoff("b", MAX_TIMEOUT)
    policy.add_handoff("a", 1000, 0.1, NOW)
    policy.add_handoff("b", 1000, 1.0, NOW)
    chosen = policy.choose(prompt(600), [PrefillLoad("a", 900), PrefillLoad("b", 100)], NOW)
    assert chosen == Handoff("a", MIN_TIMEOUT)
    # A worker without measurements counts as the fastest
    chosen = policy.choose(prompt(600), [PrefillLoad("a", 900), PrefillLoad("b", 0), PrefillLoad("new", 100)], NOW)
    assert chosen is not None
    assert chosen.worker == "new"


def test_prompt_beyond_the_window_of_a_worker(policy: HandoffPolicy) -> None:
    small = PrefillLoad("small", 0, window=701)
    assert policy.choose(prompt(600), [small], NOW) is not None
    assert policy.choose(prompt(601), [small], NOW) is None


def test_timeout_follows_the_expected_time(policy: HandoffPolicy) -> None:
    policy.add_handoff("p-0", 1000, 5.0, NOW)
    chosen = policy.choose(prompt(1000, running=9), [IDLE], NOW)
    assert chosen == Handoff("p-0", 20.0)


def test_failed_worker_is_excluded_longer_each_time(policy: HandoffPolicy, clock: VirtualClock) -> None:
    waits = []
    for _ in range(3):
        for _ in range(5):  # one failure of the worker, five prompts
            policy.add_failure("p-0", clock.now())
        waited = 0.0
        while policy.choose(prompt(600), [IDLE], clock.now()) is None:
            clock.advance(0.25)
            waited += 0.25
        waits.append(waited)
    assert waits == [0.5, 1.0, 2.0]
    policy.add_handoff("p-0", 600, 0.1, clock.now())
    policy.add_failure("p-0", clock.now())
    clock.advance(0.5)
    assert policy.choose(prompt(600), [IDLE], clock.now()) is not None
    policy.add_failure("p-0", clock.now())
    assert policy.choose(prompt(600), [IDLE, PrefillLoad("p-1", 10_000)], clock.now()) == Handoff("p-1", MAX_TIMEOUT)


def test_short_prompts_are_not_measured(policy: HandoffPolicy) -> None:
    policy.add_local(10, 5.0, NOW)
    policy.add_handoff("p-0", 1000, 1.0, NOW)
    assert policy.choose(prompt(400), [IDLE], NOW) is None


def test_custom_threshold() -> None:
    policy = HandoffPolicy(threshold=20)
    assert policy.choose(prompt(20), [IDLE], NOW) is None
    assert policy.choose(prompt(21), [IDLE], NOW) is not None

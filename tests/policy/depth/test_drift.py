"""Changes are found, with few false alarms. Traffic is simulated: every request has its own acceptance level."""

import random
from collections.abc import Sequence

import pytest

from paceline.policy.depth.drift import KEPT, MIN_AFTER, MIN_BEFORE, UNIT, AcceptanceChange, DriftTest
from tests.policy.depth.drift_simulator import FIRST, KINDS, Traffic
from tests.traffic import CHAT, CODE, PROSE


def test_constant_traffic_raises_few_false_alarms() -> None:
    """The limit is one in 10,000 requests. The simulator counts 4 in 360,000; this test runs 24,000."""
    alarms = [
        change
        for level, spread, rounds, batch in KINDS
        for seed in range(FIRST, FIRST + 10)
        for change in Traffic(seed, spread, rounds, batch).run(level, 300)
    ]
    assert len(alarms) <= 2


@pytest.mark.parametrize(
    ("before", "after", "spread", "rounds", "within", "least"),
    [
        (0.8, 0.5, 0.1, 20, 40, 18),
        (0.8, 0.6, 0.1, 20, 120, 18),
        (0.3, 0.7, 0.15, 10, 80, 18),
        (0.8, 0.5, 0.2, 40, 120, 15),
    ],
)
def test_a_change_is_found_soon(
    before: float, after: float, spread: float, rounds: int, within: int, least: int
) -> None:
    found = 0
    for seed in range(FIRST, FIRST + 20):
        traffic = Traffic(seed, spread, rounds)
        assert traffic.run(before, 60) == []
        changes = traffic.run(after, within)
        found += bool(changes)
        if changes:
            _, change = changes[0]
            assert change.traffic == CHAT
            assert change.before == pytest.approx(before, abs=0.15)
            # The level after rests on at least four requests: two standard errors of their mean are `spread`
            assert change.after == pytest.approx(after, abs=spread + 0.05)
    assert found >= least


def test_after_a_change_the_new_level_is_the_reference() -> None:
    traffic = Traffic(3, 0.05, 20)
    traffic.run(0.8, 60)
    assert len(traffic.run(0.4, 60)) == 1
    assert traffic.run(0.4, 300) == []
    ((_, back),) = traffic.run(0.8, 60)
    assert back.after > back.before + 0.3


def test_categories_are_separate() -> None:
    test = DriftTest()
    number = 0
    for _ in range(100):
        for traffic, accepted in ((CODE, True), (PROSE, False)):
            number += 1
            for _ in range(5):
                assert test.observe(traffic, number, accepted) is None
            assert test.close([number]) == []


def units(test: DriftTest, rates: Sequence[float], first: int, rounds: int = 20) -> list[AcceptanceChange]:
    """One sequence for each rate."""
    changes = []
    for number, rate in enumerate(rates, start=first):
        for i in range(rounds):
            test.observe(CHAT, number, i < rate * rounds)
        changes += test.close([number])
    return changes


def test_few_requests_prove_nothing() -> None:
    test = DriftTest()
    assert units(test, [0.9] * (MIN_BEFORE - 1), 0) == []
    assert units(test, [0.1] * (MIN_AFTER - 1), 100) == []


def test_units_that_agree_by_chance_prove_nothing() -> None:
    test = DriftTest()
    assert units(test, [0.75] * 40, 0, rounds=4) == []
    assert units(test, [0.5] * 10, 100, rounds=4) == []


def test_a_small_change_is_ignored() -> None:
    test = DriftTest()
    assert units(test, [0.8] * 120, 0, rounds=200) == []
    assert units(test, [0.75] * 120, 1000, rounds=200) == []


def test_a_change_within_one_long_sequence_is_found() -> None:
    test = DriftTest()
    changes = [
        change for unit in range(40) for _ in range(UNIT) if (change := test.observe(CHAT, 1, unit < 20)) is not None
    ]
    assert [(change.before, change.after) for change in changes] == [(1.0, 0.0)]


def test_batches_that_start_together_raise_no_alarm() -> None:
    """64 sequences of 128 tokens each, 20 times over: those with many accepted drafts end first."""
    test, dice, changes = DriftTest(), random.Random(1), list[AcceptanceChange]()
    for batch in range(20):
        running = {64 * batch + i: [min(0.99, max(0.4, dice.gauss(0.85, 0.09))), 128] for i in range(64)}
        while running:
            for number, (alpha, left) in list(running.items()):
                accepted = next((i for i in range(3) if dice.random() >= alpha), 3)
                change = test.observe(CHAT, number, accepted > 0)
                running[number][1] = left - 1 - accepted
                changes += [] if change is None else [change]
            ended = [number for number, (_, left) in running.items() if left <= 0]
            changes += test.close(ended)
            for number in ended:
                del running[number]
    assert changes == []


def test_a_sequence_that_does_not_end_delays_others_for_a_while_only() -> None:
    test = DriftTest()
    test.observe(CHAT, 0, True)
    assert units(test, [0.9] * 60, 1) == []
    changes = units(test, [0.2] * KEPT, 1000)
    assert [change.after < 0.3 for change in changes] == [True]


def test_memory_is_bounded() -> None:
    test = DriftTest()
    units(test, [0.5] * (KEPT + 50), 0, rounds=2)
    assert len(test._histories[CHAT].rounds) == KEPT
    for number in range(1000, 1000 + 2 * KEPT):  # none of them ends
        test.observe(CHAT, number, True)
    assert len(test._histories[CHAT].waiting) == KEPT
    test.close(range(1000, 1000 + 2 * KEPT))
    assert test._open == {}
    assert test.close([1, 2, 999]) == []

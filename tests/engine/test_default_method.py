"""The choice between an in-engine draft and a pool, with made-up speeds: which one wins, how soon, and how steadily."""

import pytest

from paceline.engine.traffic import DefaultMethod
from tests.speculation.default_method_simulator import BOTH, MODEL, POOL, Traffic, changes


def test_the_first_method_is_used_until_the_other_was_measured() -> None:
    traffic = Traffic()
    assert traffic.choice.goodput(POOL, 1) is None
    methods = traffic.run(12, {POOL: 100.0, MODEL: 90.0})
    assert methods[:3] == [POOL] * 3
    assert MODEL in methods[3:8]
    assert methods[8:] == [POOL] * 4
    assert traffic.choice.goodput(POOL, 1) == pytest.approx(100.0)
    assert traffic.choice.goodput(MODEL, 1) == pytest.approx(90.0)


@pytest.mark.parametrize("load", [1, 4, 16, 64])
@pytest.mark.parametrize(("rates", "best"), [({POOL: 100.0, MODEL: 115.0}, MODEL), ({POOL: 115.0, MODEL: 100.0}, POOL)])
def test_the_faster_one_is_used_after_eight_batches(load: int, rates: dict[str, float], best: str) -> None:
    traffic = Traffic()
    traffic.run(8 * load, rates, load)
    assert traffic.choice.method == best
    methods = traffic.run(40 * load, rates, load)
    assert methods.count(best) == 40


def test_trials_of_a_slower_method_take_less_than_two_percent_of_the_batches() -> None:
    traffic = Traffic()
    methods = traffic.run(2000, {POOL: 80.0, MODEL: 100.0})
    assert 1 < changes(methods) / 2 < 12
    assert methods.count(POOL) < 0.02 * len(methods)


def test_a_method_that_becomes_slower_than_the_other_is_left_within_24_sequences() -> None:
    traffic = Traffic()
    traffic.run(40, {POOL: 120.0, MODEL: 100.0})
    assert traffic.choice.method == POOL
    traffic.run(24, {POOL: 60.0, MODEL: 100.0})
    assert traffic.choice.method == MODEL


def test_a_method_that_becomes_faster_is_found_by_its_trials() -> None:
    traffic = Traffic()
    traffic.run(40, {POOL: 110.0, MODEL: 100.0})
    methods = traffic.run(1200, {POOL: 110.0, MODEL: 150.0})
    assert methods[0] == POOL
    assert traffic.choice.method == MODEL
    assert methods[-20:] == [MODEL] * 20


def test_texts_that_become_harder_for_both_do_not_change_the_choice() -> None:
    traffic = Traffic()
    traffic.run(40, {POOL: 120.0, MODEL: 100.0})
    methods = traffic.run(200, {POOL: 60.0, MODEL: 50.0})
    assert traffic.choice.method == POOL
    assert methods.count(MODEL) < 12  # a trial shows that the other became slower too


@pytest.mark.parametrize("seed", range(5))
def test_equal_methods_do_not_alternate(seed: int) -> None:
    traffic = Traffic(seed)
    same = {POOL: 100.0, MODEL: 100.0}
    traffic.run(40, same)
    chosen = []
    for _ in range(2000):
        traffic.run(1, same)
        chosen.append(traffic.choice.method)
    assert changes(chosen) <= 2


@pytest.mark.parametrize("seed", range(5))
def test_a_clear_difference_is_found_under_noise(seed: int) -> None:
    traffic = Traffic(seed)
    methods = traffic.run(600, {POOL: 100.0, MODEL: 130.0})
    assert methods[100:].count(MODEL) > 0.93 * 500


def test_every_load_has_its_own_choice_and_a_new_one_starts_with_that_of_the_nearest() -> None:
    traffic = Traffic()
    traffic.run(40, {POOL: 100.0, MODEL: 120.0}, load=1)
    traffic.run(640, {POOL: 120.0, MODEL: 100.0}, load=16)
    assert traffic.choice.method == POOL
    assert traffic.run(3, {POOL: 100.0, MODEL: 120.0}, load=1) == [MODEL] * 3
    assert traffic.run(48, {POOL: 120.0, MODEL: 100.0}, load=16) == [POOL] * 3
    assert traffic.run(2, {POOL: 100.0, MODEL: 120.0}, load=2) == [MODEL]
    assert traffic.run(32, {POOL: 100.0, MODEL: 120.0}, load=32) == [POOL]


def test_a_load_that_varies_a_little_keeps_the_choice() -> None:
    traffic = Traffic()
    traffic.run(60, {POOL: 100.0, MODEL: 120.0}, load=3)
    traffic.run(240, {POOL: 120.0, MODEL: 100.0}, load=12)
    traffic.run(80, {POOL: 100.0, MODEL: 120.0}, load=4)  # its own choice
    assert traffic.choice.method == MODEL
    assert {traffic.choice.assign(1, load, BOTH) for load in (4, 5, 7, 4, 3, 6)} == {MODEL}


def test_a_method_that_cannot_draft_is_not_chosen() -> None:
    traffic = Traffic()
    traffic.run(40, {POOL: 120.0, MODEL: 100.0})
    assert traffic.run(40, {POOL: 120.0, MODEL: 100.0}, available=(MODEL,)) == [MODEL] * 40
    assert traffic.choice.method == POOL
    assert traffic.run(3, {POOL: 120.0, MODEL: 100.0}) == [POOL] * 3
    assert traffic.choice.assign(1, 1, ()) == POOL


def test_a_trial_ends_with_its_method() -> None:
    traffic = Traffic()
    methods = traffic.run(4, {POOL: 100.0, MODEL: 90.0})
    assert methods[-1] == MODEL
    assert traffic.choice.assign(1, 1, (POOL,)) == POOL
    assert traffic.choice.assign(1, 1, BOTH) in BOTH


def test_the_first_trial_ends_when_both_methods_are_measured() -> None:
    traffic = Traffic()
    for _ in range(56):  # steps of requests that named the method
        traffic.choice.observe(MODEL, 1, 2, 0.04)
    assert traffic.run(6, {POOL: 100.0, MODEL: 50.0}) == [POOL, POOL, POOL, MODEL, POOL, POOL]


def test_a_trial_that_measures_nothing_ends_and_waits_longer() -> None:
    traffic = Traffic()
    traffic.run(3, {POOL: 100.0, MODEL: 90.0})
    methods = [traffic.choice.assign(1, 1, BOTH) for _ in range(200)]
    assert methods.count(MODEL) < 0.35 * 200
    assert methods[-40:].count(MODEL) <= 8


def test_other_steps_do_not_count() -> None:
    choice = DefaultMethod(BOTH)
    for _ in range(100):
        choice.observe("ngram", 1, 5, 0.1)
        choice.observe(POOL, 0, 0, 0.1)
        choice.observe(POOL, 1, 5, 0.0)
    assert choice.goodput(POOL, 1) is None


@pytest.mark.parametrize("methods", [(), (POOL,), (POOL, POOL), (POOL, MODEL, "eagle")])
def test_a_choice_is_between_two_methods(methods: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="two methods"):
        DefaultMethod(methods)

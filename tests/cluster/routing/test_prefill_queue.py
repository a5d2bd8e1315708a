import pytest

from paceline.cluster.routing.prefill_queue import PrefillQueue

RATE = 0.01


def test_an_empty_queue_costs_nothing() -> None:
    queue = PrefillQueue()
    assert (len(queue), queue.seconds(RATE, 5.0), queue.least_rate(5.0)) == (0, 0.0, 0.0)


def test_it_is_worked_off_in_order() -> None:
    queue = PrefillQueue()
    queue.add("a", 100, 0.0, now=10.0)
    queue.add("b", 200, 0.5, now=10.2)
    assert queue.seconds(RATE, 10.2) == pytest.approx(0.8 + 2.5)
    assert queue.seconds(RATE, 10.9) == pytest.approx(0.1 + 2.5)
    queue.remove("a", now=11.1)
    assert queue.seconds(RATE, 11.1) == pytest.approx(2.5)
    assert queue.seconds(RATE, 12.1) == pytest.approx(1.5)
    queue.remove("b", now=13.0)
    assert queue.seconds(RATE, 20.0) == 0.0


def test_what_was_learned_since_holds_for_those_who_wait() -> None:
    queue = PrefillQueue()
    queue.add("a", 100, 0.0, now=0.0)
    queue.add("b", 100, 0.0, now=0.0)
    assert queue.seconds(RATE, 0.0) == pytest.approx(2.0)
    assert queue.seconds(10 * RATE, 0.0) == pytest.approx(20.0)


def test_who_is_late_needs_as_long_again_and_those_behind_all_of_theirs() -> None:
    queue = PrefillQueue()
    queue.add("a", 100, 0.0, now=0.0)
    assert queue.seconds(RATE, 4.0) == pytest.approx(3.0)
    queue.add("b", 100, 0.0, now=4.0)
    assert queue.seconds(RATE, 4.0) == pytest.approx(4.0)
    assert queue.least_rate(4.0) == pytest.approx(0.04)


def test_one_that_overtakes_or_leaves_does_not_set_the_first_back() -> None:
    queue = PrefillQueue()
    for name in "abc":
        queue.add(name, 100, 0.0, now=0.0)
    queue.remove("b", now=0.5)
    assert queue.seconds(RATE, 0.5) == pytest.approx(0.5 + 1.0)
    queue.remove("a", now=1.0)
    assert queue.seconds(RATE, 1.5) == pytest.approx(0.5)


def test_a_short_prompt_says_nothing_about_the_rate() -> None:
    queue = PrefillQueue()
    queue.add("a", 3, 0.0, now=0.0)
    assert queue.least_rate(60.0) == 0.0

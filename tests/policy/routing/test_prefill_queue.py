import pytest

from paceline.policy.routing.worker_costs import EVICTION_HALF_LIFE, STALE_SHARE, EvictionCost, PrefillQueue

RATE = 0.01
CAPACITY = 10_000


def test_empty_queue_takes_no_time() -> None:
    queue = PrefillQueue()
    assert (len(queue), queue.seconds(RATE, 5.0), queue.min_rate(5.0)) == (0, 0.0, 0.0)


def test_prompts_are_computed_in_order() -> None:
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


def test_new_rate_applies_to_queued_prompts() -> None:
    queue = PrefillQueue()
    queue.add("a", 100, 0.0, now=0.0)
    queue.add("b", 100, 0.0, now=0.0)
    assert queue.seconds(RATE, 0.0) == pytest.approx(2.0)
    assert queue.seconds(10 * RATE, 0.0) == pytest.approx(20.0)


def test_late_prompt_counts_its_delay_again() -> None:
    queue = PrefillQueue()
    queue.add("a", 100, 0.0, now=0.0)
    assert queue.seconds(RATE, 4.0) == pytest.approx(3.0)
    queue.add("b", 100, 0.0, now=4.0)
    assert queue.seconds(RATE, 4.0) == pytest.approx(4.0)
    assert queue.min_rate(4.0) == pytest.approx(0.04)


def test_removing_a_later_prompt_keeps_the_progress_of_the_first() -> None:
    queue = PrefillQueue()
    for name in "abc":
        queue.add(name, 100, 0.0, now=0.0)
    queue.remove("b", now=0.5)
    assert queue.seconds(RATE, 0.5) == pytest.approx(0.5 + 1.0)
    queue.remove("a", now=1.0)
    assert queue.seconds(RATE, 1.5) == pytest.approx(0.5)


def test_short_prompt_gives_no_rate() -> None:
    queue = PrefillQueue()
    queue.add("a", 3, 0.0, now=0.0)
    assert queue.min_rate(60.0) == 0.0


def test_empty_cache_has_no_eviction_cost() -> None:
    assert EvictionCost().share(0, CAPACITY, 5.0) == 0.0


def test_recently_computed_tokens_are_in_use() -> None:
    cost = EvictionCost()
    cost.add(2_000, now=0.0)
    cost.add(1_000, now=0.0)
    assert cost.share(0, CAPACITY, 0.0) == pytest.approx(0.3)
    assert cost.share(0, CAPACITY, EVICTION_HALF_LIFE) == pytest.approx(0.15)
    cost.add(1_000, now=EVICTION_HALF_LIFE)
    assert cost.share(0, CAPACITY, EVICTION_HALF_LIFE) == pytest.approx(0.25)


def test_a_share_of_other_cached_tokens_is_in_use() -> None:
    assert EvictionCost().share(CAPACITY, CAPACITY, 0.0) == pytest.approx(STALE_SHARE)


def test_eviction_cost_is_at_most_one() -> None:
    cost = EvictionCost()
    cost.add(5 * CAPACITY, now=0.0)
    assert cost.share(CAPACITY, CAPACITY, 0.0) == 1.0


def test_unknown_capacity_has_no_eviction_cost() -> None:
    cost = EvictionCost()
    cost.add(1_000, now=0.0)
    assert cost.share(1_000, 0, 0.0) == 0.0

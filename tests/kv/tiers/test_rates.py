"""Bring it or compute it."""

from paceline.kv.tiers.rates import RETRY, LoadRates


def rates(prefill: float | None, disk: float | None) -> LoadRates:
    """In seconds per token."""
    made = LoadRates()
    if prefill is not None:
        made.computed(1000, 1000 * prefill)
    if disk is not None:
        made.brought("disk", 1000, 1000 * disk)
    return made


def test_what_nobody_knows_is_tried() -> None:
    assert rates(None, None).is_worth("disk")
    assert rates(1e-3, None).is_worth("disk")
    assert rates(None, 1e-3).is_worth("disk")


def test_the_quicker_way_is_taken() -> None:
    assert rates(prefill=1e-3, disk=1e-4).is_worth("disk")
    assert not rates(prefill=1e-4, disk=1e-3).is_worth("disk")
    assert not rates(prefill=1e-3, disk=0.99e-3).is_worth("disk")


def test_one_source_says_nothing_of_another() -> None:
    assert rates(prefill=1e-4, disk=1e-3).is_worth("peer")


def test_what_was_slow_is_tried_again_now_and_then() -> None:
    slow = rates(prefill=1e-4, disk=1e-3)
    assert [slow.is_worth("disk") for _ in range(2 * RETRY)].count(True) == 2
    for _ in range(60):
        slow.brought("disk", 1000, 1000 * 1e-5)
    assert slow.is_worth("disk")


def test_small_passes_say_nothing_of_prompts() -> None:
    made = LoadRates()
    made.computed(1, 0.1)
    assert made.seconds_to_compute(100) is None
    made.computed(100, 0.2)
    assert made.seconds_to_compute(50) == 0.1

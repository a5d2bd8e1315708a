"""Loading a block against computing it."""

from paceline.kv.tiers.block import RETRY, LoadRates


def rates(prefill: float | None, disk: float | None) -> LoadRates:
    """In seconds per token."""
    made = LoadRates()
    if prefill is not None:
        made.observe_compute(1000, 1000 * prefill)
    if disk is not None:
        made.observe_load("disk", 1000, 1000 * disk)
    return made


def test_an_unmeasured_source_is_tried() -> None:
    assert rates(None, None).pays("disk")
    assert rates(1e-3, None).pays("disk")
    assert rates(None, 1e-3).pays("disk")


def test_the_faster_way_is_chosen() -> None:
    assert rates(prefill=1e-3, disk=1e-4).pays("disk")
    assert not rates(prefill=1e-4, disk=1e-3).pays("disk")
    assert not rates(prefill=1e-3, disk=0.99e-3).pays("disk")


def test_sources_are_measured_separately() -> None:
    assert rates(prefill=1e-4, disk=1e-3).pays("peer")


def test_a_slow_source_is_tried_again_sometimes() -> None:
    slow = rates(prefill=1e-4, disk=1e-3)
    assert [slow.pays("disk") for _ in range(2 * RETRY)].count(True) == 2
    for _ in range(60):
        slow.observe_load("disk", 1000, 1000 * 1e-5)
    assert slow.pays("disk")


def test_small_passes_are_not_measured() -> None:
    made = LoadRates()
    made.observe_compute(1, 0.1)
    assert made.seconds_to_compute(100) is None
    made.observe_compute(100, 0.2)
    assert made.seconds_to_compute(50) == 0.1

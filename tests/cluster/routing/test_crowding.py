import pytest

from paceline.cluster.routing.prefill_queue import HALF_LIFE, STALE, Crowding

ROOM = 10_000


def test_an_empty_cache_has_nothing_to_lose() -> None:
    assert Crowding().share(0, ROOM, 5.0) == 0.0


def test_what_was_computed_lately_is_in_use() -> None:
    crowding = Crowding()
    crowding.add(2_000, now=0.0)
    crowding.add(1_000, now=0.0)
    assert crowding.share(0, ROOM, 0.0) == pytest.approx(0.3)
    assert crowding.share(0, ROOM, HALF_LIFE) == pytest.approx(0.15)
    crowding.add(1_000, now=HALF_LIFE)
    assert crowding.share(0, ROOM, HALF_LIFE) == pytest.approx(0.25)


def test_of_what_else_is_there_a_part_is() -> None:
    assert Crowding().share(ROOM, ROOM, 0.0) == pytest.approx(STALE)


def test_it_is_never_more_than_all_of_it() -> None:
    crowding = Crowding()
    crowding.add(5 * ROOM, now=0.0)
    assert crowding.share(ROOM, ROOM, 0.0) == 1.0


def test_of_a_cache_of_unknown_size_nothing_is_known() -> None:
    crowding = Crowding()
    crowding.add(1_000, now=0.0)
    assert crowding.share(1_000, 0, 0.0) == 0.0

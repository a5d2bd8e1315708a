import gc
from collections.abc import Iterator

import pytest

from paceline.core.garbage import keep_loaded


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)


def test_what_is_loaded_is_not_looked_through_again() -> None:
    loaded: list[object] = [[]]
    keep_loaded()
    made: list[object] = [[]]
    watched = {id(one) for one in gc.get_objects()}
    assert id(loaded) not in watched
    assert id(made) in watched


def test_a_step_of_many_sequences_is_no_reason_to_collect() -> None:
    keep_loaded()
    before = gc.get_stats()[0]["collections"]
    step = [[i] for i in range(5 * 256)]
    assert gc.get_stats()[0]["collections"] == before
    del step


def test_cycles_are_found_in_the_end() -> None:
    keep_loaded()
    collected = []
    gc.callbacks.append(lambda phase, info: collected.append(info["collected"]))
    try:
        for _ in range(30_000):
            cycle: list[object] = []
            cycle.append(cycle)
    finally:
        gc.callbacks.pop()
    assert sum(collected) > 20_000

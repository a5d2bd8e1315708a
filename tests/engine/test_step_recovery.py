"""The bisection alone: which sequences are found, and what the others keep."""

from collections.abc import Collection

import pytest

from paceline.core.errors import RankLost
from paceline.engine.recovery import Recovery, recover


def run(sequences: list[int], bad: set[int]) -> tuple[Recovery[int, int], int]:
    calls = 0

    def step(part: Collection[int]) -> tuple[bool, list[int]]:
        nonlocal calls
        calls += 1
        if bad.intersection(part):
            raise ValueError(f"{sorted(bad.intersection(part))}")
        return True, list(part)

    return recover(sequences, ValueError("all"), step), calls


def test_one_bad_sequence_is_found_and_the_others_are_computed_once() -> None:
    for bad in range(16):
        found, calls = run(list(range(16)), {bad})
        assert [one for one, _ in found.culprits] == [bad]
        assert sorted(found.outputs) == [one for one in range(16) if one != bad]
        assert found.has_succeeded
        assert calls == 8  # two halves on each of four levels


def test_several_bad_sequences_are_found() -> None:
    found, _ = run(list(range(9)), {0, 3, 8})
    assert sorted(one for one, _ in found.culprits) == [0, 3, 8]
    assert sorted(found.outputs) == [1, 2, 4, 5, 6, 7]


def test_a_single_sequence_gets_a_second_try() -> None:
    found, calls = run([1], set())
    assert (found.culprits, found.outputs, calls) == ([], [1], 1)
    found, calls = run([1], {1})
    assert ([one for one, _ in found.culprits], found.has_succeeded, calls) == ([1], False, 1)


def test_a_failure_that_passes_ends_no_sequence() -> None:
    found, calls = run(list(range(8)), set())
    assert (found.culprits, sorted(found.outputs), calls) == ([], list(range(8)), 2)


def test_a_lost_rank_is_no_failure_of_a_sequence() -> None:
    def step(part: Collection[int]) -> tuple[bool, list[int]]:
        raise RankLost("rank 1")

    with pytest.raises(RankLost):
        recover([1, 2], ValueError(), step)

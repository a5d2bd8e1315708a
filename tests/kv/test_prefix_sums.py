from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from paceline.core.sequence import BLOCK_SIZE
from paceline.kv.prefix import PrefixSums

IDS = [(7 * i * i + 3) % 49152 for i in range(1000)]


class Sums(PrefixSums):
    def __call__(self, ids: Any, first_block: int = 0, before: int = 0) -> list[int]:
        return list(super().__call__(ids, first_block, before))


@pytest.fixture
def sums() -> Sums:
    return Sums(seed=1)


def added(base: int, numbers: Sequence[int]) -> list[int]:
    return [(base + number) % 2**64 for number in numbers]


def test_every_full_block_has_one_number_for_any_type_of_ids(sums: Sums) -> None:
    numbers = sums(IDS)
    assert len(numbers) == len(set(numbers)) == 1000 // BLOCK_SIZE
    assert sums(tuple(IDS)) == sums(np.array(IDS, np.int32)) == sums(np.array(IDS)) == numbers
    assert sums([]) == sums(IDS[:15]) == sums(np.array(IDS[:15], np.int32)) == []


def test_the_numbers_follow_the_formula(sums: Sums) -> None:
    blocks, offset, weights = sums._blocks.tolist(), int(sums._offset[0]), sums._tokens.tolist()
    total, expected = 0, []
    for i in range(62):
        own = IDS[16 * i : 16 * i + 16]
        total += blocks[i] * (offset + sum(w * t for w, t in zip(weights, own, strict=True)))
        expected.append(total % 2**64)
    assert sums(IDS) == expected


def test_a_longer_prefix_extends_the_numbers_of_a_shorter_one(sums: Sums) -> None:
    numbers = sums(IDS)
    assert sums(IDS[:320]) == numbers[:20]
    assert sums(IDS[320:], 20, numbers[19]) == added(numbers[19], sums(IDS[320:], 20)) == numbers[20:]


def test_a_single_block_has_the_same_number_as_in_a_batch(sums: Sums) -> None:
    numbers = sums(IDS)
    assert sums(IDS[:16]) == sums(np.array(IDS[:20], np.int32)) == numbers[:1]
    assert sums(IDS[16:32], 1, numbers[0]) == added(numbers[0], sums(IDS[16:32], 1)) == numbers[1:2]
    assert sums(IDS[:15], 0, numbers[0]) == []


def test_the_same_block_at_another_position_has_another_number(sums: Sums) -> None:
    assert sums([5] * BLOCK_SIZE, 0) != sums([5] * BLOCK_SIZE, 1)
    assert sums([5, 6] * 8) != sums([6, 5] * 8)


@pytest.mark.parametrize("position", [0, 15, 16, 500, 991])
def test_a_changed_token_changes_all_later_numbers(sums: Sums, position: int) -> None:
    other = IDS.copy()
    other[position] ^= 1
    block = position // BLOCK_SIZE
    same, different = sums(IDS), sums(other)
    assert same[:block] == different[:block]
    assert not set(same[block:]) & set(different[block:])


def test_blocks_of_token_0_count(sums: Sums) -> None:
    numbers = sums([0] * 64)
    assert len(set(numbers)) == 4
    assert 0 not in numbers


def test_growth_changes_no_number(sums: Sums) -> None:
    long = IDS * 100
    first = sums(IDS)
    assert len(sums(long)) == 6250
    assert sums(IDS) == first
    assert sums(long) == Sums(seed=1)(long)


def test_weights_are_secret_by_default() -> None:
    assert Sums()(IDS) != Sums()(IDS)

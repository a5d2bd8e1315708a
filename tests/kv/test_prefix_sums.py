import numpy as np
import pytest

from paceline.kernels.layout import BLOCK_SIZE
from paceline.kv.prefix_sums import PrefixSums

IDS = [(7 * i * i + 3) % 49152 for i in range(1000)]


def test_one_number_a_full_block_whatever_holds_the_ids() -> None:
    sums = PrefixSums(seed=1)
    numbers = sums(IDS)
    assert len(numbers) == len(set(numbers)) == 1000 // BLOCK_SIZE
    assert sums(tuple(IDS)) == sums(np.array(IDS, np.int32)) == sums(np.array(IDS)) == numbers
    assert sums([]) == sums(IDS[:15]) == []


def test_a_prefix_has_the_numbers_of_its_beginning_and_goes_on_from_them() -> None:
    sums = PrefixSums(seed=1)
    numbers = sums(IDS)
    assert sums(IDS[:320]) == numbers[:20]
    rest = sums(IDS[320:], 20)
    assert [(numbers[19] + number) % 2**64 for number in rest] == numbers[20:]


def test_the_same_block_elsewhere_is_another() -> None:
    sums = PrefixSums(seed=1)
    assert sums([5] * BLOCK_SIZE, 0) != sums([5] * BLOCK_SIZE, 1)


@pytest.mark.parametrize("position", [0, 15, 16, 500, 991])
def test_one_other_token_changes_everything_after_it(position: int) -> None:
    sums = PrefixSums(seed=1)
    other = IDS.copy()
    other[position] ^= 1
    block = position // BLOCK_SIZE
    same, different = sums(IDS), sums(other)
    assert same[:block] == different[:block]
    assert not set(same[block:]) & set(different[block:])


def test_blocks_of_token_0_count() -> None:
    numbers = PrefixSums(seed=1)([0] * 64)
    assert len(set(numbers)) == 4 and 0 not in numbers


def test_growth_changes_no_number() -> None:
    small, large = PrefixSums(seed=4), PrefixSums(seed=4)
    long = IDS * 40
    first = small(IDS)
    assert small(long) == large(long)
    assert small(IDS) == first


def test_weights_are_secret_by_default() -> None:
    assert PrefixSums()(IDS) != PrefixSums()(IDS)

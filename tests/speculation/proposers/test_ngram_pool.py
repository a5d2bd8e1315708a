import pytest

from paceline.speculation.proposers.ngram_pool import NgramPool


def test_the_latest_comes_first_and_none_twice() -> None:
    pool = NgramPool()
    for ngram in ((1, 2, 3), (1, 4, 5), (9, 9, 9), (1, 2, 3)):
        pool.add(ngram)
    assert pool.after(1) == [(2, 3), (4, 5)]
    assert pool.after(2) == []
    assert len(pool) == 3


def test_it_is_bounded_both_ways() -> None:
    pool = NgramPool(per_key=2, max_keys=3)
    for first in range(5):
        for rest in range(4):
            pool.add((first, rest))
    assert len(pool) == 6
    assert pool.after(4) == [(3,), (2,)]
    assert pool.after(0) == []
    for sizes in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="room"):
            NgramPool(*sizes)

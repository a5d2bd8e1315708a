import random

from paceline.cluster.routing.reservations import Promises
from paceline.kv.prefix_sums import PrefixSums

SUMS = PrefixSums(seed=3)
RED, BLUE = 17, 23
PROMPT = list(range(160))


def test_the_common_beginning_counts() -> None:
    promises = Promises()
    promises.add("1", 5, SUMS(PROMPT), RED)
    assert promises.match(SUMS(PROMPT[:64] + [7] * 64), RED) == [(64, (5,))]
    assert promises.match(SUMS([*PROMPT, *PROMPT]), RED) == [(160, (5,))]
    assert promises.match(SUMS(PROMPT[:24]), RED) == [(16, (5,))]
    assert promises.match(SUMS([7] * 160), RED) == []


def test_salts_keep_promises_apart() -> None:
    promises = Promises()
    promises.add("1", 5, SUMS(PROMPT), RED)
    assert promises.match(SUMS(PROMPT), BLUE) == []


def test_a_prompt_under_one_block_promises_nothing() -> None:
    promises = Promises()
    promises.add("1", 5, SUMS(PROMPT[:15]), RED)
    assert len(promises) == 0
    assert promises.match(SUMS(PROMPT[:15]), RED) == []
    promises.drop("1")


def test_the_last_one_at_a_worker_counts_until_it_is_over() -> None:
    promises = Promises()
    promises.add("1", 5, SUMS(PROMPT), RED)
    promises.add("2", 5, SUMS(PROMPT[:32] + [9] * 32), RED)
    promises.add("3", 6, SUMS(PROMPT), RED)
    assert sorted(promises.match(SUMS(PROMPT), RED)) == [(32, (5,)), (160, (6,))]
    promises.drop("1")  # was replaced
    assert len(promises) == 2
    promises.drop("2")
    promises.drop("2")
    assert promises.match(SUMS(PROMPT), RED) == [(160, (6,))]
    promises.drop("3")
    assert (len(promises), promises._by_first) == (0, {})


def test_it_finds_what_a_walk_finds() -> None:
    generator = random.Random(5)
    for _ in range(200):
        one = [generator.randrange(2) for _ in range(16 * generator.randrange(1, 9))]
        other = one[: 16 * generator.randrange(1, 9)] + [generator.randrange(2) for _ in range(16)]
        promises = Promises()
        promises.add("1", 0, SUMS(one), RED)
        common = 0
        while common < min(len(one), len(other)) // 16 and one[: 16 * common + 16] == other[: 16 * common + 16]:
            common += 1
        assert promises.match(SUMS(other), RED) == [(16 * common, (0,))]

import random
from collections.abc import Sequence

from paceline.kv.prefix import PrefixSums
from paceline.policy.routing.kv_router import Reservations

SUMS = PrefixSums(seed=3)
RED, BLUE = 17, 23
PROMPT = list(range(160))


def sums(ids: list[int], salt: int) -> Sequence[int]:
    return SUMS(ids, 0, salt)


def test_common_prefix_matches() -> None:
    reservations = Reservations()
    reservations.add("1", 5, sums(PROMPT, RED))
    assert reservations.match(sums(PROMPT[:64] + [7] * 64, RED)) == [(64, (5,))]
    assert reservations.match(sums([*PROMPT, *PROMPT], RED)) == [(160, (5,))]
    assert reservations.match(sums(PROMPT[:24], RED)) == [(16, (5,))]
    assert reservations.match(sums([7] * 160, RED)) == []


def test_salts_are_isolated() -> None:
    reservations = Reservations()
    reservations.add("1", 5, sums(PROMPT, RED))
    assert reservations.match(sums(PROMPT, BLUE)) == []


def test_prompt_under_one_block_reserves_nothing() -> None:
    reservations = Reservations()
    reservations.add("1", 5, sums(PROMPT[:15], RED))
    assert len(reservations) == 0
    assert reservations.match(sums(PROMPT[:15], RED)) == []
    reservations.remove("1")


def test_last_prompt_of_a_worker_counts_until_removed() -> None:
    reservations = Reservations()
    reservations.add("1", 5, sums(PROMPT, RED))
    reservations.add("2", 5, sums(PROMPT[:32] + [9] * 32, RED))
    reservations.add("3", 6, sums(PROMPT, RED))
    assert sorted(reservations.match(sums(PROMPT, RED))) == [(32, (5,)), (160, (6,))]
    reservations.remove("1")  # was replaced
    assert len(reservations) == 2
    reservations.remove("2")
    reservations.remove("2")
    assert reservations.match(sums(PROMPT, RED)) == [(160, (6,))]
    reservations.remove("3")
    assert (len(reservations), reservations._by_first) == (0, {})


def test_bisection_agrees_with_a_linear_search() -> None:
    generator = random.Random(5)
    for _ in range(200):
        one = [generator.randrange(2) for _ in range(16 * generator.randrange(1, 9))]
        other = one[: 16 * generator.randrange(1, 9)] + [generator.randrange(2) for _ in range(16)]
        reservations = Reservations()
        reservations.add("1", 0, sums(one, RED))
        common = 0
        while common < min(len(one), len(other)) // 16 and one[: 16 * common + 16] == other[: 16 * common + 16]:
            common += 1
        assert reservations.match(sums(other, RED)) == [(16 * common, (0,))]

import random

import pytest

from paceline.speculation.proposers.traffic import RecentTraffic


def knows(traffic: RecentTraffic, salt: str, text: list[int]) -> bool:
    return any(index.match(text)[1] == len(text) for index in traffic.indices(salt))


def test_salts_are_apart() -> None:
    traffic = RecentTraffic(100)
    traffic.add("a", [1, 2, 3])
    assert knows(traffic, "a", [1, 2, 3])
    assert not knows(traffic, "b", [1])
    assert traffic.indices("") == ()


def test_the_old_are_forgotten_and_the_young_kept() -> None:
    traffic = RecentTraffic(40)  # ten tokens an index, two indices a salt
    for i in range(6):
        traffic.add("a", [10 * i + k for k in range(6)])
    assert traffic.num_tokens <= 20
    assert knows(traffic, "a", [50, 51, 52, 53, 54, 55])
    assert not knows(traffic, "a", [0, 1])


def test_the_longest_unused_salt_goes_first() -> None:
    traffic = RecentTraffic(40)
    for salt in ("a", "b", "c", "d"):
        traffic.add(salt, list(range(10)))
    traffic.indices("a")  # used again
    traffic.add("e", list(range(10)))
    assert knows(traffic, "a", [1, 2])
    assert not knows(traffic, "b", [1])
    assert knows(traffic, "e", [1, 2])


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_holds_whatever_comes(seed: int) -> None:
    rng = random.Random(seed)
    traffic = RecentTraffic(64)
    for _ in range(200):
        text = [rng.randrange(50) for _ in range(rng.randint(0, 90))]
        salt = str(rng.randrange(6))
        traffic.add(salt, text)
        held = sum(len(index) for s in map(str, range(6)) for index in traffic.indices(s))
        assert traffic.num_tokens == held <= 64
        assert not text or knows(traffic, salt, text[-16:])


def test_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 4"):
        RecentTraffic(3)

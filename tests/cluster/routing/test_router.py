import pytest

from paceline.cluster.routing.router import LeastLoaded, RoundRobin, WorkerLoad, make_router


def load(name: str, assigned: int = 0, seats: int = 8, kv_use: float = 0.0) -> WorkerLoad:
    return WorkerLoad(name, assigned, seats, kv_use)


def test_round_robin_takes_turns_whatever_the_order() -> None:
    router = RoundRobin()
    workers = [load("b"), load("c"), load("a")]
    assert [router.choose((), workers) for _ in range(4)] == ["a", "b", "c", "a"]
    assert [router.choose((), workers[::-1]) for _ in range(2)] == ["b", "c"]


def test_round_robin_skips_who_left_and_includes_who_came() -> None:
    router = RoundRobin()
    assert router.choose((), [load("a"), load("b"), load("c")]) == "a"
    assert router.choose((), [load("a"), load("c")]) == "c"
    assert router.choose((), [load("a"), load("b"), load("c"), load("d")]) == "d"


@pytest.mark.parametrize(
    ("workers", "chosen"),
    [
        ([load("a", 3), load("b", 2)], "b"),
        ([load("a", 4, seats=32), load("b", 2, seats=8)], "a"),  # a larger worker takes more
        ([load("a", 2, kv_use=0.9), load("b", 2, kv_use=0.1)], "b"),
        ([load("b"), load("a")], "a"),
        ([load("a", 99, seats=8)], "a"),  # full is not gone: it waits there
    ],
)
def test_least_loaded(workers: list[WorkerLoad], chosen: str) -> None:
    assert LeastLoaded().choose((), workers) == chosen


def test_least_loaded_spreads_a_burst_by_seats() -> None:
    seats = {"big": 24, "small": 8}
    assigned = dict.fromkeys(seats, 0)
    for _ in range(64):
        assigned[LeastLoaded().choose((), [load(n, assigned[n], seats[n]) for n in seats])] += 1
    assert assigned == {"big": 48, "small": 16}


def test_policies_by_name() -> None:
    assert isinstance(make_router("round_robin"), RoundRobin)
    assert isinstance(make_router("least_loaded"), LeastLoaded)

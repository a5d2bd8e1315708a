import pytest

from paceline.policy.routing.router import LeastLoaded, RoundRobin, RoutedPrompt, WorkerLoad, make_router

PROMPT = RoutedPrompt(())


def load(name: str, assigned: int = 0, max_num_seqs: int = 8, kv_use: float = 0.0) -> WorkerLoad:
    return WorkerLoad(name, assigned, max_num_seqs, kv_use)


def test_round_robin_is_independent_of_the_order() -> None:
    router = RoundRobin()
    workers = [load("b"), load("c"), load("a")]
    assert [router.choose(PROMPT, workers) for _ in range(4)] == ["a", "b", "c", "a"]
    assert [router.choose(PROMPT, workers[::-1]) for _ in range(2)] == ["b", "c"]


def test_round_robin_follows_changes_of_the_workers() -> None:
    router = RoundRobin()
    assert router.choose(PROMPT, [load("a"), load("b"), load("c")]) == "a"
    assert router.choose(PROMPT, [load("a"), load("c")]) == "c"
    assert router.choose(PROMPT, [load("a"), load("b"), load("c"), load("d")]) == "d"


@pytest.mark.parametrize(
    ("workers", "chosen"),
    [
        ([load("a", 3), load("b", 2)], "b"),
        ([load("a", 4, max_num_seqs=32), load("b", 2, max_num_seqs=8)], "a"),  # relative to its capacity
        ([load("a", 2, kv_use=0.9), load("b", 2, kv_use=0.1)], "b"),
        ([load("b"), load("a")], "a"),
        ([load("a", 99, max_num_seqs=8)], "a"),  # a full worker is still chosen if it is the only one
    ],
)
def test_least_loaded(workers: list[WorkerLoad], chosen: str) -> None:
    assert LeastLoaded().choose(PROMPT, workers) == chosen


def test_least_loaded_spreads_a_burst_by_capacity() -> None:
    max_num_seqs = {"big": 24, "small": 8}
    assigned = dict.fromkeys(max_num_seqs, 0)
    for _ in range(64):
        assigned[LeastLoaded().choose(PROMPT, [load(n, assigned[n], max_num_seqs[n]) for n in max_num_seqs])] += 1
    assert assigned == {"big": 48, "small": 16}


def test_policies_by_name() -> None:
    assert isinstance(make_router("round_robin"), RoundRobin)
    assert isinstance(make_router("least_loaded"), LeastLoaded)

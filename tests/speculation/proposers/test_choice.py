"""The choice of a method for each sequence of `combined`."""

import pytest

from paceline.speculation.proposers.choice import EXPLORE_EVERY, DraftCandidate, MethodChoice


def candidate(sequence_id: int = 0, depth: int = 4, **lookups: int) -> DraftCandidate:
    return DraftCandidate(sequence_id, depth, lookups)


def teach(
    choice: MethodChoice, method: str, accepted: int, rounds: int = 60, sequence_id: int = 0, size: int = 4
) -> None:
    for _ in range(rounds):
        choice.observe(sequence_id, method, size, accepted)


def test_the_better_lookup_is_chosen() -> None:
    choice = MethodChoice([])
    teach(choice, "ngram", 1)
    teach(choice, "suffix", 3)
    assert choice.choose([candidate(ngram=4, suffix=4), candidate(ngram=4)]) == ["suffix", "ngram"]
    assert choice.choose([candidate(), candidate(suffix=0)]) == ["", ""]


def test_draft_sizes_are_separate() -> None:
    """A short draft of a method whose long drafts are good."""
    choice = MethodChoice([])
    for _ in range(60):
        choice.observe(0, "suffix", 8, 6)
        choice.observe(0, "suffix", 1, 0)
        choice.observe(0, "ngram", 4, 1)
    assert choice.choose([candidate(suffix=8, ngram=4), candidate(suffix=1, ngram=4)]) == ["suffix", "ngram"]


def test_sequences_are_separate() -> None:
    choice = MethodChoice([])
    for _ in range(60):
        for sequence_id, (ngram, suffix) in enumerate([(3, 1), (1, 3)]):
            choice.observe(sequence_id, "ngram", 4, ngram)
            choice.observe(sequence_id, "suffix", 4, suffix)
    both = [candidate(0, ngram=4, suffix=4), candidate(1, ngram=4, suffix=4)]
    assert choice.choose(both) == ["ngram", "suffix"]
    choice.forget(0)
    assert choice.expected(0, "ngram", 4) == pytest.approx(2.0, abs=0.3)


def costed(seconds: float) -> MethodChoice:
    """A model with 3 of 4 tokens accepted, a lookup with 1, and a pass of 10 ms."""
    choice = MethodChoice(["model"])
    teach(choice, "model", 3)
    teach(choice, "ngram", 1)
    choice.observe_pass_time(0.010)
    choice.observe_draft_time("model", seconds)
    return choice


def test_a_model_is_used_while_it_pays() -> None:
    # 1 + 3 instead of 1 + 1 tokens: it pays while the step takes less than twice as long
    assert costed(0.008).choose([candidate(ngram=4)]) == ["model"]
    assert costed(0.012).choose([candidate(ngram=4)]) == ["ngram"]


def test_the_batch_shares_the_cost_of_a_model() -> None:
    """For one of four sequences a model does not pay: it makes the step of all of them longer."""
    choice = costed(0.004)
    teach(choice, "ngram", 4, rounds=200, sequence_id=1)
    teach(choice, "model", 0, rounds=200, sequence_id=1)
    teach(choice, "ngram", 1, rounds=200, sequence_id=0)
    teach(choice, "model", 3, rounds=200, sequence_id=0)
    needs, has = candidate(0, ngram=4), candidate(1, ngram=4)
    assert choice.choose([needs]) == ["model"]
    assert choice.choose([needs, has, has, has]) == ["ngram"] * 4
    assert choice.choose([needs, needs, needs, has]) == ["model", "model", "model", "ngram"]


def test_an_unknown_model_is_used_at_once() -> None:
    choice = MethodChoice(["model"])
    teach(choice, "ngram", 1)
    assert choice.choose([candidate(ngram=4)]) == ["model"]


@pytest.mark.parametrize(("seconds", "most"), [(0.012, 1 / EXPLORE_EVERY), (0.1, 0.004)])
def test_exploration_is_bounded_in_rounds_and_in_time(seconds: float, most: float) -> None:
    choice, rounds = costed(seconds), 4_000
    tried = sum(choice.choose([candidate(ngram=4)]) == ["model"] for _ in range(rounds))
    assert 0 < tried <= most * rounds
    assert tried * seconds <= rounds * 0.010 / EXPLORE_EVERY


def test_a_batch_explores_no_more_steps_than_one_sequence() -> None:
    """A step in which one sequence uses a model takes longer for all of them."""
    choice, steps, explored = costed(0.012), 1_000, set[int]()
    batch = [candidate(i, ngram=4) for i in range(24)]
    with_model = 0
    for _ in range(steps):
        users = [i for i, method in enumerate(choice.choose(batch)) if method == "model"]
        with_model += bool(users)
        explored.update(users)
    assert 0 < with_model <= steps / EXPLORE_EVERY
    assert explored == set(range(24))


def test_a_running_model_is_explored_by_other_sequences() -> None:
    choice = costed(0.001)
    teach(choice, "model", 0, rounds=40, sequence_id=1)
    teach(choice, "ngram", 2, rounds=40, sequence_id=1)
    teach(choice, "model", 4, rounds=40, sequence_id=0)
    batch, steps = [candidate(0, ngram=4), candidate(1, ngram=4)], 320
    chosen = [choice.choose(batch) for _ in range(steps)]
    assert [first for first, _ in chosen] == ["model"] * steps
    assert 0 < [second for _, second in chosen].count("model") <= steps / EXPLORE_EVERY


def test_a_draft_that_matches_all_new_text_is_censored() -> None:
    short, censored = MethodChoice([]), MethodChoice([])
    teach(short, "suffix", 3)
    teach(censored, "suffix", 3)
    for _ in range(60):
        short.observe(0, "suffix", 4, 1)
        censored.observe(0, "suffix", 4, 1, open_ended=True)
    assert short.expected(0, "suffix", 4) < 2.0
    assert censored.expected(0, "suffix", 4) > 2.5


def test_a_change_of_the_text_changes_the_choice() -> None:
    choice = MethodChoice([])
    teach(choice, "ngram", 3)
    teach(choice, "suffix", 2)
    assert choice.choose([candidate(ngram=4, suffix=4)]) == ["ngram"]
    teach(choice, "ngram", 0, rounds=30)
    teach(choice, "suffix", 2, rounds=30)
    assert choice.choose([candidate(ngram=4, suffix=4)]) == ["suffix"]


def test_one_slow_draft_of_a_model_is_soon_forgotten() -> None:
    choice = costed(1.0)
    assert choice.choose([candidate(ngram=4)]) == ["ngram"]
    choice.observe_draft_time("model", 0.002)
    assert choice.choose([candidate(ngram=4)]) == ["model"]

import pytest

from paceline.speculation.proposers.choice import EXPLORE_EVERY, Candidate, MethodChoice


def candidate(sequence_id: int = 0, depth: int = 4, **in_hand: int) -> Candidate:
    return Candidate(sequence_id, depth, in_hand)


def teach(
    choice: MethodChoice, method: str, accepted: int, rounds: int = 60, sequence_id: int = 0, size: int = 4
) -> None:
    for _ in range(rounds):
        choice.observe(sequence_id, method, size, accepted)


def test_the_lookup_that_did_better_is_chosen() -> None:
    choice = MethodChoice([])
    teach(choice, "ngram", 1)
    teach(choice, "suffix", 3)
    assert choice.choose([candidate(ngram=4, suffix=4), candidate(ngram=4)]) == ["suffix", "ngram"]
    assert choice.choose([candidate(), candidate(suffix=0)]) == ["", ""]


def test_sizes_are_told_apart() -> None:
    """A short guess of a method that is good when it has much to say."""
    choice = MethodChoice([])
    for _ in range(60):
        choice.observe(0, "suffix", 8, 6)
        choice.observe(0, "suffix", 1, 0)
        choice.observe(0, "ngram", 4, 1)
    assert choice.choose([candidate(suffix=8, ngram=4), candidate(suffix=1, ngram=4)]) == ["suffix", "ngram"]


def test_sequences_are_told_apart() -> None:
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
    """A model that has 3 of 4 accepted, a lookup that has 1, and a pass of 10 ms."""
    choice = MethodChoice(["model"])
    teach(choice, "model", 3)
    teach(choice, "ngram", 1)
    choice.passed(0.010)
    choice.took("model", seconds)
    return choice


def test_a_model_is_used_while_it_pays() -> None:
    # 1 + 3 against 1 + 1 tokens: worth it while the step takes less than twice as long
    assert costed(0.008).choose([candidate(ngram=4)]) == ["model"]
    assert costed(0.012).choose([candidate(ngram=4)]) == ["ngram"]


def test_its_cost_is_shared_by_the_batch() -> None:
    """For one of four a model is too dear: it lengthens the step of all."""
    choice = costed(0.004)
    teach(choice, "ngram", 4, rounds=200, sequence_id=1)
    teach(choice, "model", 0, rounds=200, sequence_id=1)
    teach(choice, "ngram", 1, rounds=200, sequence_id=0)
    teach(choice, "model", 3, rounds=200, sequence_id=0)
    needs, has = candidate(0, ngram=4), candidate(1, ngram=4)
    assert choice.choose([needs]) == ["model"]
    assert choice.choose([needs, has, has, has]) == ["ngram"] * 4
    assert choice.choose([needs, needs, needs, has]) == ["model", "model", "model", "ngram"]


def test_an_unknown_model_is_tried_at_once() -> None:
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
    """Each step in which anybody uses a model costs everybody its time."""
    choice, steps, everybody = costed(0.012), 1_000, set[int]()
    batch = [candidate(i, ngram=4) for i in range(24)]
    with_model = 0
    for _ in range(steps):
        who = [i for i, method in enumerate(choice.choose(batch)) if method == "model"]
        with_model += bool(who)
        everybody.update(who)
    assert 0 < with_model <= steps / EXPLORE_EVERY
    assert everybody == set(range(24))


def test_a_model_that_runs_anyhow_is_tried_again_where_it_was_poor() -> None:
    choice = costed(0.001)
    teach(choice, "model", 0, rounds=40, sequence_id=1)
    teach(choice, "ngram", 2, rounds=40, sequence_id=1)
    teach(choice, "model", 4, rounds=40, sequence_id=0)
    batch, steps = [candidate(0, ngram=4), candidate(1, ngram=4)], 320
    chosen = [choice.choose(batch) for _ in range(steps)]
    assert [first for first, _ in chosen] == ["model"] * steps
    assert 0 < [second for _, second in chosen].count("model") <= steps / EXPLORE_EVERY


def test_what_matched_to_the_end_may_have_had_more() -> None:
    short, censored = MethodChoice([]), MethodChoice([])
    teach(short, "suffix", 3)
    teach(censored, "suffix", 3)
    for _ in range(60):
        short.observe(0, "suffix", 4, 1)
        censored.observe(0, "suffix", 4, 1, open_ended=True)
    assert short.expected(0, "suffix", 4) < 2.0
    assert censored.expected(0, "suffix", 4) > 2.5


def test_a_change_of_text_is_noticed() -> None:
    choice = MethodChoice([])
    teach(choice, "ngram", 3)
    teach(choice, "suffix", 2)
    assert choice.choose([candidate(ngram=4, suffix=4)]) == ["ngram"]
    teach(choice, "ngram", 0, rounds=30)
    teach(choice, "suffix", 2, rounds=30)
    assert choice.choose([candidate(ngram=4, suffix=4)]) == ["suffix"]


def test_a_prompt_to_catch_up_with_does_not_count_against_a_model_for_long() -> None:
    choice = costed(1.0)
    assert choice.choose([candidate(ngram=4)]) == ["ngram"]
    choice.took("model", 0.002)
    assert choice.choose([candidate(ngram=4)]) == ["model"]

"""The runs of benchmarks/vllm/vllm_plugin.py: no prompt serves twice, except where it is meant to."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "vllm"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    sys.modules.pop("vllm_rounds", None)


def prompts(first, count):
    return [[first + i] for i in range(count)]


def test_a_prompt_is_new_once_and_repeated_once():
    rounds = importlib.import_module("vllm_rounds")
    runs = rounds.plan([1, 4], 2, prompts(100, 10), prompts(0, 5))
    by_group = {group: [] for group in (rounds.WARM_UP, rounds.NEW, rounds.REPEATED)}
    for run in runs:
        by_group[run.group] += [tuple(ids) for ids in run.prompts]
    assert len(set(by_group[rounds.NEW])) == 10
    assert sorted(by_group[rounds.NEW]) == sorted(by_group[rounds.REPEATED])
    assert not set(by_group[rounds.WARM_UP]) & set(by_group[rounds.NEW])
    with pytest.raises(rounds.NotEnoughPrompts, match="10 measured prompts"):
        rounds.plan([1, 4], 2, prompts(100, 9), prompts(0, 5))


def test_without_lookups_prompts_serve_again_in_other_batches():
    rounds = importlib.import_module("vllm_rounds")
    runs = rounds.plan([1, 4], 3, prompts(100, 7), prompts(0, 5), has_lookups=False)
    assert {run.group for run in runs} == {rounds.WARM_UP, rounds.NEW}
    measured = [ids[0] - 100 for run in runs if run.group == rounds.NEW for ids in run.prompts]
    assert measured == [i % 7 for i in range(15)]


def test_a_next_turn_repeats_the_prompts_of_its_run_and_adds_tokens():
    rounds = importlib.import_module("vllm_rounds")
    runs = rounds.plan([1, 2], 2, prompts(100, 6), prompts(0, 3), turn_tokens=3)
    assert [run.group for run in runs] == 2 * [rounds.WARM_UP] + 4 * [rounds.NEW]
    for run in runs:
        turn = run.next_turn
        assert run.turns == [run, turn]
        assert turn.turns == [turn]
        assert (turn.group, turn.index) == (rounds.NEXT if run.group == rounds.NEW else rounds.WARM_UP, run.index)
        assert [ids[:1] for ids in turn.prompts] == run.prompts
        assert all(len(ids) == 4 for ids in turn.prompts)
    assert runs[2].next_turn.prompts == [[100, 101, 102, 103]]
    assert runs[-1].next_turn.prompts == [[104, 105, 0, 1], [105, 0, 1, 2]]


def test_with_next_turns_a_prompt_is_in_one_run_only():
    rounds = importlib.import_module("vllm_rounds")
    with pytest.raises(rounds.NotEnoughPrompts, match="6 measured prompts"):
        rounds.plan([1, 2], 2, prompts(100, 5), prompts(0, 3), has_lookups=False, turn_tokens=3)
    runs = rounds.plan([1, 2], 2, prompts(100, 6), prompts(0, 3), has_lookups=False, turn_tokens=3)
    seen = [tuple(ids) for run in runs for ids in run.prompts]
    assert len(set(seen)) == len(seen) == 9


def test_contenders_without_lookups_are_compared_by_their_run_of_the_new_prompts():
    rounds = importlib.import_module("vllm_rounds")

    def outcome(group, contender, seconds):
        return rounds.Outcome(group, 0, 2, contender, seconds, [[1, 2], [3, 4]], {})

    table = rounds.tables(
        [
            outcome(rounds.NEW, "plain", 1.0),
            outcome(rounds.NEW, "plain_sync", 2.0),
            outcome(rounds.REPEATED, "plain_sync", 2.0),
            outcome(rounds.REPEATED, "combined", 0.5),
        ]
    )
    assert "| 2 | combined | 8 | 8 to 8 | 2.00 | 4.00 | 0 of 2 |  |" in table


def test_next_turns_have_a_table_and_are_compared_with_each_other():
    rounds = importlib.import_module("vllm_rounds")

    def outcome(group, contender, seconds, cached):
        return rounds.Outcome(group, 0, 2, contender, seconds, [[1, 2], [3, 4]], {"cached": cached})

    outcomes = [
        outcome(rounds.NEW, "plain", 4.0, 0),
        outcome(rounds.NEXT, "plain", 1.0, 32),
        outcome(rounds.NEW, "paceline", 4.0, 0),
        outcome(rounds.NEXT, "paceline", 0.5, 48),
    ]
    new, following = rounds.tables(outcomes).split("Next turns:")
    assert "| 2 | paceline | 1 | 1 to 1 | 1.00 |  | 0 of 2 | 0 cached |" in new
    assert "| 2 | paceline | 8 | 8 to 8 | 2.00 |  | 0 of 2 | 48 cached |" in following
    # Other prompts are no base
    assert "| 2 | paceline | 8 | 8 to 8 |  |  |  | 48 cached |" in rounds.tables([outcomes[0], *outcomes[2:]])

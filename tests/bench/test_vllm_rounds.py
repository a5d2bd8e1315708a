"""The runs of benchmarks/vllm_plugin.py: no prompt serves twice, except where it is meant to."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in ("vllm_rounds", "vllm_report"):
        sys.modules.pop(name, None)


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


def test_contenders_without_lookups_are_compared_by_their_run_of_the_new_prompts():
    rounds, report = importlib.import_module("vllm_rounds"), importlib.import_module("vllm_report")

    def outcome(group, contender, seconds):
        return report.Outcome(group, 0, 2, contender, seconds, [[1, 2], [3, 4]], {})

    table = report.tables(
        [
            outcome(rounds.NEW, "plain", 1.0),
            outcome(rounds.NEW, "plain_sync", 2.0),
            outcome(rounds.REPEATED, "plain_sync", 2.0),
            outcome(rounds.REPEATED, "combined", 0.5),
        ]
    )
    assert "| 2 | combined | 8 | 8 to 8 | 2.00 | 4.00 | 0 of 2 |  |" in table

"""The table of sampled texts of benchmarks/vllm_plugin.py: which differences the logits explain."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from paceline.speculation.verification.noise import NoiseKey, Purpose, gumbel_at

FOLDER = Path(__file__).parents[2] / "benchmarks"
PROMPT = [5, 6, 7]
SAMPLING = {"temperature": 0.5, "seed": 3}


@pytest.fixture
def sampled(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("vllm_sampled")
    sys.modules.pop("vllm_sampled", None)


def text(sampled, tokens, gap):
    """One text of two tokens, whose second position reports `gap` between tokens 2 and 9."""
    logprobs = [{"1": -0.1, "4": -3.0}, {"2": -1.0, "9": -1.0 - gap}]
    return sampled.Sampled.of([{"tokens": [tokens], "logprobs": [logprobs]}])


def needed():
    """Gap between tokens 2 and 9 above which 2 is picked at the second position."""
    key = NoiseKey(SAMPLING["seed"], 0, len(PROMPT) + 1)
    two, nine = gumbel_at([key], Purpose.SHARED, torch.tensor([[2, 9]]))[0].tolist()
    return SAMPLING["temperature"] * (nine - two)


def test_a_difference_is_explained_by_gaps_on_both_sides_of_the_noise(sampled):
    base, own = text(sampled, [1, 2], needed() + 0.02), text(sampled, [1, 9], needed() - 0.03)
    (found,) = sampled.differences(own, base, [PROMPT], [SAMPLING]).values()
    assert found.position == 1
    assert found.is_explained
    assert found.shift == pytest.approx(0.05)


@pytest.mark.parametrize(("in_base", "in_own"), [(0.02, 0.02), (-0.02, -0.02), (-0.02, 0.02)])
def test_a_pick_that_the_reported_logits_contradict_is_not_explained(sampled, in_base, in_own):
    base, own = text(sampled, [1, 2], needed() + in_base), text(sampled, [1, 9], needed() + in_own)
    (found,) = sampled.differences(own, base, [PROMPT], [SAMPLING]).values()
    assert not found.is_explained


def test_a_row_counts_positions_before_the_difference_and_shifts_there(sampled):
    base, own = text(sampled, [1, 2], needed() + 0.02), text(sampled, [1, 9], needed() - 0.03)
    row = sampled.row("drafts", "none", own, base, [PROMPT], [SAMPLING], {"steps": 4})
    assert (
        row
        == "| drafts | none | 1 of 1 | 1 of 1 | 0 | 0.050, 0.050 | 0.000, 0.000 | 1 to 1, median 1 | 1 of 2 | 4 steps |"
    )


def test_equal_texts_leave_the_cells_empty(sampled):
    base = text(sampled, [1, 2], 0.5)
    row = sampled.row("batches", "one", base, base, [PROMPT], [SAMPLING], {})
    assert row == "| batches | one | 0 of 1 |  |  |  | 0.000, 0.000 |  | 2 of 2 |  |"

"""Picks and acceptance of coupled sampling, without vLLM."""

import torch

from paceline.core.request import SamplingParams
from paceline.vllm.coupled import PLACEHOLDER, SamplingRows, accept, pick


def test_a_pick_depends_on_seed_and_position_and_not_on_the_batch():
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=t, top_p=p) for t, p in [(1.0, 1.0), (0.7, 0.9), (0.0, 1.0)] * 2]
    positions = torch.tensor([5, 6, 7, 8, 9, 10])
    together = pick(logits, SamplingRows(params, [1, 2, 3, 4, 5, 6], positions))
    for i in range(6):
        alone = pick(logits[i : i + 1], SamplingRows(params[i : i + 1], [i + 1], positions[i : i + 1]))
        assert together[i] == alone[0]
    assert together[2] == logits[2].argmax()
    elsewhere = [int(pick(logits[:1], SamplingRows(params[:1], [1], torch.tensor([at])))) for at in range(50)]
    assert len(set(elsewhere)) > 20


def test_drafts_are_accepted_up_to_the_first_that_differs_from_the_pick():
    drafts = torch.tensor([1, 2, 3, 4, 5, 6])
    picks = torch.tensor([1, 2, 9, 4, 8, 6])
    bonus = torch.tensor([50, 51, 52, 53])
    tokens = accept(drafts, picks, bonus, [3, 0, 1, 2])
    none = PLACEHOLDER
    assert tokens.dtype == torch.int32
    assert tokens.tolist() == [
        [1, 2, 9, none],
        [51, none, none, none],
        [4, 52, none, none],
        [8, none, none, none],
    ]
    assert accept(drafts[:0], picks[:0], bonus, [0, 0, 0, 0]).tolist() == [[50], [51], [52], [53]]

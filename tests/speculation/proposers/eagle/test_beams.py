"""Growing a tree on the device reads no value on the host. test_eagle.py verifies the trees."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.request import SamplingParams
from paceline.models.heads.eagle.eagle import EagleRunner
from paceline.speculation.drafts.drafts import DraftTree
from paceline.speculation.proposer import SequenceProgress
from paceline.speculation.proposers.eagle.eagle_trees import Beams, CachedSequence, Level, choose
from paceline.speculation.trees.growth import RankRules, draft_row
from tests.fakes import tiny_model
from tests.heads import tiny_eagle


class NoWaits(TorchDispatchMode):
    """Fails on operations that wait for a GPU: values read back, shapes that depend on values, tensors from the host."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "lift_fresh")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(name in str(func) for name in self.WAITS), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 9, "seed": 1}])
def test_no_operation_waits(monkeypatch, sampling):
    monkeypatch.setattr("paceline.kernels.cpu.native.library", lambda: None)
    head = tiny_eagle(tiny_model(), reduced=24)
    monkeypatch.setattr(
        "paceline.models.decoder.ops.paged_attention", lambda q, *rest: q.flatten(1)
    )  # the reference kernel waits
    runner = EagleRunner(head, 8, 8)
    sequences = [CachedSequence([0, 1], 20, 19), CachedSequence([2], 5, 30)]
    rows = [
        draft_row(SequenceProgress(i, [1, 2], 9, SamplingParams(**sampling), 1, 0, 1, "coupled"), ()) for i in range(2)
    ]
    with torch.inference_mode():
        rules = [
            RankRules.of(
                [row for row in rows for _ in range(width)], [True] * 2 * width, head.vocabulary.ids, torch.empty(2, 24)
            )
            for width in (1, 4, 4)
        ]
        beams, states = Beams(runner, sequences, width=4, branches=5), torch.randn(2, 32)
        with NoWaits():
            levels = beams.grow(states, rules)
    assert [tuple(level.tokens.shape) for level in levels] == [(2, 1, 5), (2, 4, 5), (2, 4, 5)]
    with pytest.raises(AssertionError), NoWaits():
        levels[0].tokens.tolist() and levels[0].confidence.max().item()


def test_trees_are_chosen_from_levels():
    first = Level(torch.tensor([[[7, 8, 9]]]), torch.tensor([[[-0.1, -1.0, -torch.inf]]]), torch.zeros(1, 1).long())
    second = Level(
        torch.tensor([[[1, 2, 3], [4, 5, 6]]]),
        torch.tensor([[[-0.2, -3.0, -4.0], [-0.3, -5.0, -6.0]]]),
        torch.tensor([[0, 1]]),
    )
    (tree,) = choose([first, second], [4], [None])
    assert tree.draft() == DraftTree((7, 1, 8, 4), (-1, 0, -1, 2))
    (tree,) = choose([first, second], [99], [None])
    assert 9 not in tree.draft().tokens  # impossible

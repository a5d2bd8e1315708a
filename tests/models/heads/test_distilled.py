"""A distilled draft against plain torch, through the paged cache."""

import pytest
import torch

from paceline.models.heads.trained import DistilledModel
from paceline.models.runner.runner import ModelRunner, Span
from tests.fakes import tiny_model
from tests.heads import TensorWeights, draft_config, draft_tensors
from tests.models.reference_heads import distilled_logits

pytestmark = pytest.mark.usefixtures("unrounded_drafts")

IDS = [7, 3, 22, 9, 14, 39, 0, 5, 5, 8, 31, 17, 2, 6, 28, 11, 4, 13, 19]


@pytest.mark.parametrize("reduced", [None, 24])
def test_logits_equal_the_reference(reduced: int | None) -> None:
    target = tiny_model()
    config = draft_config(target, "distilled")
    tensors = draft_tensors(config, reduced=reduced)
    runner = ModelRunner(DistilledModel(config, TensorWeights(tensors), target), 2)
    first = runner.forward([Span([0, 1], 0, IDS[:10], 10)]).logits
    second = runner.forward([Span([0, 1], 10, IDS[10:], 9)]).logits
    assert first is not None
    assert second is not None
    logits = torch.cat((first, second))
    assert logits.shape == (len(IDS), target.config.vocab_size)
    expected = distilled_logits(tensors, config, target, IDS)
    columns = torch.arange(40) if reduced is None else torch.arange(reduced) + tensors["d2t"]
    torch.testing.assert_close(logits[:, columns], expected, rtol=1e-4, atol=1e-4)
    others = torch.ones(40, dtype=torch.bool)
    others[columns] = False
    assert (logits[:, others] == -torch.inf).all()


def test_the_targets_tables_are_not_copied() -> None:
    target = tiny_model()
    config = draft_config(target, "distilled")
    tensors = draft_tensors(config)
    model = DistilledModel(config, TensorWeights(tensors), target)
    assert model.embedding is target.embedding
    assert model.head is target.head
    matrices = sum(value.numel() * 4 for value in tensors.values() if value.dim() == 2)
    assert matrices <= model.weight_bytes < 1.5 * matrices  # packed weights are padded

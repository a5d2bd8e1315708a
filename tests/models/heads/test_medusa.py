"""Medusa heads against plain torch."""

import pytest
import torch

from tests.fakes import tiny_model
from tests.heads import draft_config, draft_tensors, medusa_model
from tests.models.reference_heads import medusa_logits, target_states

pytestmark = pytest.mark.usefixtures("unrounded_drafts")


@pytest.mark.parametrize("reduced", [None, 24])
def test_every_head_equals_the_reference(reduced: int | None) -> None:
    target = tiny_model()
    config = draft_config(target, "medusa")
    tensors = draft_tensors(config, reduced=reduced)
    model = medusa_model(config, tensors, target)
    _, last = target_states(target, [5, 9, 2, 30], ())
    logits = model.logits(last)
    assert logits.shape == (4, 3, reduced or target.config.vocab_size)
    for k in (1, 2, 3):
        torch.testing.assert_close(logits[:, k - 1], medusa_logits(tensors, target, last, k), rtol=1e-4, atol=1e-4)


def test_a_head_of_zeros_repeats_the_target() -> None:
    target = tiny_model()
    config = draft_config(target, "medusa", num_heads=1)
    zero = {name: torch.zeros_like(value) for name, value in draft_tensors(config).items()}
    _, last = target_states(target, [5, 9], ())
    torch.testing.assert_close(medusa_model(config, zero, target).logits(last)[:, 0], target.logits(last))

"""A draft made for a small model, on a larger one that contains it."""

import pytest
import torch

from paceline.core.errors import IncompatibleDraft
from paceline.kernels.linear import embedding_rows
from paceline.models.architectures import inflate as module
from paceline.models.architectures.inflate import inflate
from paceline.models.architectures.inflation import SHAPES, Inflation, Shape
from paceline.models.architectures.llama import DecoderModel
from paceline.models.drafts.load import find_draft, load_draft
from paceline.models.drafts.vocabulary import embedding_for, head_for, inner_width
from paceline.models.loading.checkpoint import Checkpoint
from paceline.models.loading.load import LoadedModel
from paceline.models.runner import ModelRunner, Span
from tests.fakes import TINY, RandomWeights, tiny_model
from tests.heads import draft_config, draft_tensors, save_draft
from tests.models.reference_heads import target_states

pytestmark = pytest.mark.usefixtures("unrounded_drafts")

IDS = [7, 3, 22, 9, 14, 39, 0, 5]


@pytest.fixture
def large(monkeypatch):
    """The tiny model inside a wider one."""
    monkeypatch.setattr(module, "SHAPES", SHAPES | {"wide": Shape(96, 3, 8, 2, 32, 128)})
    small = Checkpoint("tiny", TINY, RandomWeights(TINY, 0), lambda: None)
    wide = inflate(small, Inflation("wide"), "cpu", torch.float32)
    return DecoderModel(wide.config, wide.weights, torch.device("cpu"), torch.float32)


def test_only_an_empty_rest_counts(large):
    assert inner_width(large, 32) == 32
    assert inner_width(large, 24) == 96  # cuts through the small model
    assert inner_width(large, 96) == 96
    assert inner_width(tiny_model(), 16) == 32
    assert inner_width(tiny_model(), 0) == 32


def test_the_targets_own_tables_are_not_copied():
    target = tiny_model()
    assert embedding_for(target, 32) is target.embedding
    assert head_for(target, 32, None) is target.head


def test_first_columns_and_chosen_rows(large):
    target, ids = tiny_model(), torch.tensor([4, 30])
    rows = embedding_rows(target.head, torch.arange(40))
    torch.testing.assert_close(embedding_rows(embedding_for(large, 32), torch.arange(40)), rows.bfloat16().float())
    torch.testing.assert_close(embedding_rows(head_for(large, 32, ids), torch.arange(2)), rows[ids])
    torch.testing.assert_close(embedding_rows(head_for(target, 32, ids), torch.arange(2)), rows[ids])


@pytest.mark.parametrize("kind", ["eagle", "medusa", "distilled"])
def test_drafts_say_the_same_on_both(large, tmp_path, kind):
    config = draft_config(tiny_model(), kind, state_layers=[0, 1, 2])
    folder = find_draft(save_draft(tmp_path, config, draft_tensors(config, reduced=24)))
    assert folder is not None
    said = []
    for target in (tiny_model(), large):
        draft = load_draft(folder, LoadedModel("target", target.config, target, None)).model
        inner, last = target_states(target, IDS, (0, 1, 2))
        if kind == "eagle":
            said.append(draft.fuse(inner))
        elif kind == "medusa":
            said.append(draft.logits(last))
        else:
            said.append(ModelRunner(draft, 1).forward([Span([0], 0, IDS, len(IDS))]).logits)
    torch.testing.assert_close(said[0], said[1], rtol=0.02, atol=0.03)  # tables in bfloat16


def test_a_wider_target_that_is_full_is_refused(tmp_path):
    config = draft_config(tiny_model(), "medusa", hidden_size=16)
    folder = find_draft(save_draft(tmp_path, config, draft_tensors(config)))
    assert folder is not None
    target = tiny_model()
    with pytest.raises(IncompatibleDraft, match="hidden size 16, and this one has 32"):
        load_draft(folder, LoadedModel("target", target.config, target, None))

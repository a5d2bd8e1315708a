"""Embedding, head and matrices of a draft: its target's, or parts of an inflated target's."""

import pytest
import torch

from paceline.core.errors import IncompatibleDraft
from paceline.kernels.cpu import native
from paceline.kernels.formats.weights import Dense
from paceline.kernels.linear import embedding_rows, linear
from paceline.model_files.hub.hub import SHAPES, InflatedShape, Inflation
from paceline.models.decoder.forward import DecoderModel
from paceline.models.drafts.load import find_draft, load_draft
from paceline.models.heads.vocabulary import embedding_for, head_for, inner_width, prepare_draft
from paceline.models.loading.inflated import inflate
from paceline.models.loading.load import LoadedModel
from paceline.models.runner.runner import ModelRunner, Span
from paceline.models.weights.checkpoint import Checkpoint
from tests.fakes import TINY, RandomWeights, tiny_model
from tests.heads import draft_config, draft_tensors, save_draft
from tests.models.reference_heads import target_states

IDS = [7, 3, 22, 9, 14, 39, 0, 5]


@pytest.fixture
def large(monkeypatch):
    """An inflated target around the tiny model."""
    monkeypatch.setitem(SHAPES, "wide", InflatedShape(96, 3, 8, 2, 32, 128))
    small = Checkpoint("tiny", TINY, RandomWeights(TINY, 0), lambda: None)
    wide = inflate(small, Inflation("wide"), "cpu", torch.float32)
    return DecoderModel(wide.config, wide.weights, torch.device("cpu"), torch.float32)


@pytest.mark.usefixtures("unrounded_drafts")
def test_inner_width_is_that_of_the_inflated_model(large):
    assert inner_width(large, 32) == 32
    assert inner_width(large, 24) == 96  # narrower than the small model
    assert inner_width(large, 96) == 96
    assert inner_width(tiny_model(), 16) == 32
    assert inner_width(tiny_model(), 0) == 32


@pytest.mark.usefixtures("unrounded_drafts")
def test_tables_of_the_same_width_are_shared():
    target = tiny_model()
    assert embedding_for(target, 32) is target.embedding
    assert head_for(target, 32, None) is target.head


@pytest.mark.usefixtures("unrounded_drafts")
def test_tables_are_the_first_columns_and_chosen_rows(large):
    target, ids = tiny_model(), torch.tensor([4, 30])
    rows = embedding_rows(target.head, torch.arange(40))
    torch.testing.assert_close(embedding_rows(embedding_for(large, 32), torch.arange(40)), rows.bfloat16().float())
    torch.testing.assert_close(embedding_rows(head_for(large, 32, ids), torch.arange(2)), rows[ids])
    torch.testing.assert_close(embedding_rows(head_for(target, 32, ids), torch.arange(2)), rows[ids])


@pytest.mark.usefixtures("unrounded_drafts")
@pytest.mark.parametrize("kind", ["eagle", "medusa", "distilled"])
def test_a_draft_computes_the_same_on_an_inflated_target(large, tmp_path, kind):
    config = draft_config(tiny_model(), kind, state_layers=[0, 1, 2])
    folder = find_draft(save_draft(tmp_path, config, draft_tensors(config, reduced=24)))
    assert folder is not None
    results = []
    for target in (tiny_model(), large):
        draft = load_draft(folder, LoadedModel("target", target.config, target, None)).model
        inner, last = target_states(target, IDS, (0, 1, 2))
        if kind == "eagle":
            results.append(draft.fuse(inner))
        elif kind == "medusa":
            results.append(draft.logits(last))
        else:
            results.append(ModelRunner(draft, 1).forward([Span([0], 0, IDS, len(IDS))]).logits)
    torch.testing.assert_close(results[0], results[1], rtol=0.02, atol=0.03)  # tables in bfloat16


@pytest.mark.usefixtures("unrounded_drafts")
def test_a_wider_target_that_is_not_inflated_is_rejected(tmp_path):
    config = draft_config(tiny_model(), "medusa", hidden_size=16)
    folder = find_draft(save_draft(tmp_path, config, draft_tensors(config)))
    assert folder is not None
    target = tiny_model()
    with pytest.raises(IncompatibleDraft, match="hidden size 16, and this target has 32"):
        load_draft(folder, LoadedModel("target", target.config, target, None))


CPU = torch.device("cpu")


@pytest.mark.skipif(not native.available(), reason="needs a C compiler")
def test_matrices_of_a_draft_are_8_bit_on_a_cpu() -> None:
    torch.manual_seed(0)
    values, x = torch.randn(40, 64), torch.randn(3, 64)
    weight = prepare_draft(Dense(values), CPU, torch.float32)
    assert weight.nbytes < 0.6 * values.nbytes
    error = (linear(x, weight) - x @ values.T).norm() / (x @ values.T).norm()
    assert 0 < error < 0.01


def test_matrices_that_do_not_divide_into_groups_are_kept() -> None:
    values, x = torch.randn(40, 20), torch.randn(3, 20)
    torch.testing.assert_close(linear(x, prepare_draft(Dense(values), CPU, torch.float32)), x @ values.T)

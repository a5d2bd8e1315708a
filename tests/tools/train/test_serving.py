"""Saved drafts give the same logits in training and in inference."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.model_files.tokenizer.tokenizer import Tokenizer
from paceline.models.drafts.load import find_draft, load_draft
from paceline.models.heads.eagle.eagle import EagleModel, EagleRunner
from paceline.models.heads.medusa import MedusaModel
from paceline.models.loading.load import LoadedModel, load_model
from paceline.models.runner.runner import ModelRunner, Span
from paceline.tools.train.layers import DraftVocabulary
from paceline.tools.train.saved_draft import load_draft as load_trained
from paceline.tools.train.saved_draft import save_draft
from paceline.tools.train.target import Target, identity
from tests.tools.train.test_evaluate import drafts
from tests.tools.train.tiny import VOCAB, some_ids

pytestmark = pytest.mark.usefixtures("unrounded_drafts")

LENGTH = 20
IDS = some_ids(1, LENGTH)


@pytest.fixture(scope="module")
def served(tiny_folder: Path) -> LoadedModel:
    return load_model(tiny_folder)


@pytest.fixture(params=[False, True], ids=["whole", "reduced"])
def vocabulary(request: pytest.FixtureRequest) -> DraftVocabulary:
    return DraftVocabulary(VOCAB, torch.arange(1, VOCAB, 2) if request.param else None)


def both(
    kind: str, target: Target, tokenizer: Tokenizer, served: LoadedModel, vocabulary: DraftVocabulary, folder: Path
) -> tuple[Tensor, Any]:
    """The logits of training, for every depth and row, and the served draft."""
    save_draft(folder, drafts(target)[kind], vocabulary, target, identity(target.name, tokenizer))
    trained = load_trained(folder).draft
    with torch.no_grad():
        hidden = trained.predict(target, target.states(IDS, trained.state_layers), 3).hidden[:, 0]  # [U, S, D]
    found = find_draft(folder)
    assert found is not None
    head = vocabulary.head(target.head)
    return hidden @ head.T, load_draft(found, served)


def test_eagle(
    target: Target, tokenizer: Tokenizer, served: LoadedModel, vocabulary: DraftVocabulary, tmp_path: Path
) -> None:
    expected, head = both("eagle", target, tokenizer, served, vocabulary, tmp_path)
    model = head.model
    assert isinstance(model, EagleModel)
    ids, last = IDS[0].tolist(), 12  # features of tokens 0 .. 11 are known
    inner = target.states(IDS, model.config.state_layers).inner
    assert inner is not None
    states = dict(zip(model.config.state_layers, inner[0, :last].chunk(3, -1), strict=True))
    runner = EagleRunner(model, num_blocks=2, num_lanes=1)
    with torch.inference_mode():
        state = runner.forward([Span([0, 1], 0, ids[1 : last + 1], 0)], model.fuse(states))[-1:]
        runner.copy([0], runner.lane(0)[:1])
        for depth in range(3):
            torch.testing.assert_close(model.logits(state)[0], expected[depth, last + depth], rtol=1e-3, atol=1e-3)
            place = last + depth
            state = runner.forward([Span([*runner.lane(0)], place, [ids[place + 1]], 0)], state)


def test_medusa(
    target: Target, tokenizer: Tokenizer, served: LoadedModel, vocabulary: DraftVocabulary, tmp_path: Path
) -> None:
    expected, head = both("medusa", target, tokenizer, served, vocabulary, tmp_path)
    assert isinstance(head.model, MedusaModel)
    with torch.inference_mode():
        logits = head.model.logits(target.states(IDS).last[0])  # [S, H, V']
    for k in (1, 2, 3):
        torch.testing.assert_close(logits[:-k, k - 1], expected[k - 1, k:], rtol=1e-3, atol=1e-3)


def test_distilled(
    target: Target, tokenizer: Tokenizer, served: LoadedModel, vocabulary: DraftVocabulary, tmp_path: Path
) -> None:
    expected, model = both("distilled", target, tokenizer, served, vocabulary, tmp_path)
    out = ModelRunner(model.model, 2).forward([Span([0, 1], 0, IDS[0].tolist(), LENGTH)])
    assert out.logits is not None
    logits = out.logits
    if vocabulary.ids is not None and logits.shape[1] == VOCAB:
        logits = logits[:, vocabulary.ids]
    torch.testing.assert_close(logits, expected[0], rtol=1e-3, atol=1e-3)

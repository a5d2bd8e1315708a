"""Training and serving compute the same function: a draft is saved by training and loaded for serving."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.models.drafts.load import find_draft, load_draft
from paceline.models.heads.eagle.eagle import EagleModel, EagleRunner
from paceline.models.loading.load import LoadedModel, load_model
from paceline.models.runner.runner import ModelRunner, Span
from paceline.tools.train.layers import DraftVocabulary
from paceline.tools.train.saved_draft import load_draft as load_for_training
from paceline.tools.train.saved_draft import save_draft
from paceline.tools.train.target import Target, identity
from tests.models.reference_heads import target_states
from tests.tools.train.test_evaluate import drafts
from tests.tools.train.tiny import VOCAB, open_tiny, some_ids

pytestmark = pytest.mark.usefixtures("unrounded_drafts")

IDS: list[int] = some_ids(1, 24)[0].tolist()
ROW, DEPTHS = 20, 3
"""Predictions of token `ROW + 1` as the first, second and third draft of a round are compared."""


def served(kind: str, draft, target: LoadedModel) -> list[Tensor]:
    """Logits over the draft's vocabulary, by depth."""
    model = target.model
    if kind == "distilled":
        logits = ModelRunner(draft.model, 2).forward([Span([0, 1], 0, IDS[: ROW + 1], 1)]).logits
        return [logits[0][draft.model.vocabulary.ids]] * DEPTHS
    if kind == "medusa":
        _, last = target_states(model, IDS, ())
        return [draft.model.logits(last)[ROW - k, k - 1] for k in (1, 2, 3)]
    assert isinstance(draft.model, EagleModel)
    head, found = draft.model, []
    inner, _ = target_states(model, IDS, head.config.state_layers)
    for depth in range(DEPTHS):
        runner, slots = EagleRunner(head, 2, 1), ROW - depth  # committed slots
        with torch.inference_mode():
            states = head.fuse({layer: rows[:slots] for layer, rows in inner.items()})
            state = runner.forward([Span([0, 1], 0, IDS[1 : slots + 1], 0)], states)[-1:]
            for step in range(depth):
                state = runner.forward([Span([0, 1], slots + step, [IDS[slots + 1 + step]], 0)], state)
            found.append(head.logits(state)[0])
    return found


@pytest.mark.parametrize("kind", ["eagle", "medusa", "distilled"])
def test_training_and_serving_agree(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    trained_on, tokenizer, _ = open_tiny(tmp_path / "target")
    assert isinstance(trained_on, Target)
    vocabulary = DraftVocabulary(VOCAB, torch.arange(0, VOCAB, 2))
    fresh = drafts(trained_on)[kind]
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_draft(tmp_path / "draft", fresh, vocabulary, trained_on, identity("tiny", tokenizer))
    saved = load_for_training(tmp_path / "draft").draft
    states = trained_on.states(torch.tensor([IDS]), saved.state_layers)
    hidden = saved.predict(trained_on, states, DEPTHS).hidden  # [U, 1, S, D]
    head = vocabulary.head(trained_on.head)
    expected = [(hidden[min(depth, len(hidden) - 1), 0, ROW] @ head.T).detach() for depth in range(DEPTHS)]

    target = load_model(tmp_path / "target")
    folder = find_draft(tmp_path / "draft")
    assert folder is not None
    for ours, theirs in zip(served(kind, load_draft(folder, target), target), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-3)

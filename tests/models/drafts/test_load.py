"""Folders of trained drafts: recognised, checked against their target, and loaded."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from paceline.core.errors import IncompatibleDraft, UnsupportedModel
from paceline.model_files.tokenizer.compatibility import fingerprint
from paceline.model_files.tokenizer.tokenizer import Tokenizer
from paceline.models.drafts.load import LoadedHead, find_draft, load_draft, open_draft_folder
from paceline.models.heads.eagle.eagle import EagleModel
from paceline.models.heads.medusa import MedusaModel
from paceline.models.heads.trained import DistilledModel
from paceline.models.loading.load import LoadedModel, open_checkpoint
from tests.fakes import tiny_model
from tests.heads import draft_config, draft_tensors, save_draft
from tests.models.heads.eagle.test_eagle import published


def loaded_target(tokenizer: Any = None) -> LoadedModel:
    model = tiny_model()
    return LoadedModel("tiny", model.config, model, cast(Tokenizer, tokenizer))


def save(folder: Path, kind: str, reduced: int | None = None, **extra: Any) -> str:
    config = draft_config(tiny_model(), kind, draft_vocab_size=reduced, **extra)
    return save_draft(folder, config, draft_tensors(config, reduced=reduced))


def load(path: str, tokenizer: Any = None) -> LoadedHead | LoadedModel:
    folder = find_draft(path)
    assert folder is not None
    return load_draft(folder, loaded_target(tokenizer))


@pytest.mark.parametrize("reduced", [None, 24])
@pytest.mark.parametrize(
    ("kind", "model"), [("eagle", EagleModel), ("medusa", MedusaModel), ("distilled", DistilledModel)]
)
def test_each_kind_is_loaded(tmp_path: Path, kind: str, model: type, reduced: int | None) -> None:
    draft = load(save(tmp_path / "draft", kind, reduced))
    assert draft.name == "draft"
    assert isinstance(draft.model, model)
    assert isinstance(draft, LoadedModel) == (kind == "distilled")
    columns = draft.model.vocabulary.head.shape[0]
    assert columns == (reduced or 40)
    if reduced:
        words = draft.model.vocabulary.tokens(torch.arange(columns)).tolist()
        assert words == torch.linspace(0, 39, 24).long().tolist()


def test_the_published_layout(tmp_path: Path) -> None:
    target = tiny_model()
    tensors = draft_tensors(draft_config(target, "eagle"), reduced=24)
    tensors["lm_head.weight"] = torch.randn(24, 32)
    draft = load(save_draft(tmp_path / "head", published(target), tensors))
    assert isinstance(draft.model, EagleModel)
    assert draft.model.config.state_layers == (0, 1, 2)
    assert isinstance(draft, LoadedHead)
    assert draft.kv_bytes_per_token() == 2 * 2 * 16 * 4
    folder = find_draft(tmp_path / "head")
    assert folder is not None
    assert folder.is_published


def test_whole_models_are_not_drafts(tmp_path: Path) -> None:
    assert find_draft("inflate:llama-8b") is None
    assert open_draft_folder(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert find_draft(tmp_path) is None


def test_unknown_kinds_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"paceline_draft": "oracle"}))
    with pytest.raises(UnsupportedModel, match="'oracle'; supported: eagle, medusa, distilled"):
        find_draft(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": "mlp"}))
    with pytest.raises(UnsupportedModel, match="'mlp'; supported: eagle3"):
        find_draft(tmp_path)


def test_a_draft_is_rejected_as_a_target(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="pass it as `draft`"):
        open_checkpoint(save(tmp_path / "draft", "medusa"))


@pytest.mark.parametrize(("key", "value"), [("hidden_size", 48), ("vocab_size", 41)])
def test_a_draft_of_another_shape_is_rejected(tmp_path: Path, key: str, value: int) -> None:
    path = save(tmp_path / "draft", "medusa")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    (tmp_path / "draft" / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(IncompatibleDraft, match=rf"{value}, and this target has"):
        load(path)


def test_a_draft_of_another_vocabulary_is_rejected(tmp_path: Path, smollm2: Tokenizer) -> None:
    own = {"name": "SmolLM2", "vocabulary": fingerprint(smollm2).vocabulary}
    assert load(save(tmp_path / "own", "medusa", target=own), smollm2).name == "own"
    other = {"name": "another", "vocabulary": "0" * 64}
    with pytest.raises(IncompatibleDraft, match="trained for another, whose vocabulary differs"):
        load(save(tmp_path / "other", "medusa", target=other), smollm2)

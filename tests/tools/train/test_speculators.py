"""Heads exported to the format of `speculators` load again and draft the same tokens."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.core.errors import InvalidRequest, UnsupportedModel
from paceline.models.drafts.load import load_draft, open_draft_folder
from paceline.models.heads.eagle.eagle import EagleModel
from paceline.models.loading.load import load_model
from paceline.tools.train.card import export_head
from tests.heads import draft_config, draft_tensors, save_draft


@pytest.mark.parametrize("reduced", [None, 100])
def test_an_exported_head_is_the_same_head(tmp_path: Path, tiny_folder: Path, reduced: int | None) -> None:
    target = load_model(tiny_folder)
    config = draft_config(target.model, "eagle", draft_vocab_size=reduced)
    save_draft(tmp_path / "head", config, draft_tensors(config, reduced=reduced))
    export_head(tmp_path / "head", tiny_folder, tmp_path / "exported", speculative_tokens=5)

    written = json.loads((tmp_path / "exported" / "config.json").read_text("utf-8"))
    assert written["norm_before_residual"] is False
    assert written["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    ours, theirs = (open_draft_folder(tmp_path / name) for name in ("head", "exported"))
    assert ours is not None
    assert theirs is not None
    assert theirs.is_published
    one, other = (load_draft(folder, target).model for folder in (ours, theirs))
    assert isinstance(one, EagleModel)
    assert isinstance(other, EagleModel)
    decoder = replace(other.config.decoder, rms_eps=one.config.rms_eps)
    assert replace(other.config, decoder=decoder) == one.config
    states = torch.randn(3, target.config.hidden_size, generator=torch.Generator().manual_seed(1))
    mine, exported = one.logits(states), other.logits(states)
    # Not equal: a head of its own is rounded to 4 bits on a CPU, and here the target's is not
    assert bool((torch.cosine_similarity(exported, mine, dim=1) > 0.99).all())
    columns = torch.arange(mine.shape[1])
    assert torch.equal(one.vocabulary.tokens(columns), other.vocabulary.tokens(columns))


def test_what_is_no_head_of_ours_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    target = load_model(tiny_folder)
    config = draft_config(target.model, "medusa")
    save_draft(tmp_path / "medusa", config, draft_tensors(config))
    with pytest.raises(UnsupportedModel, match="not an EAGLE head"):
        export_head(tmp_path / "medusa", tiny_folder, tmp_path / "out")
    config = draft_config(target.model, "eagle")
    save_draft(tmp_path / "head", config, draft_tensors(config))
    (tmp_path / "out").mkdir()
    with pytest.raises(InvalidRequest, match="exists"):
        export_head(tmp_path / "head", tiny_folder, tmp_path / "out")

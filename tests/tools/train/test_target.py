from pathlib import Path

import pytest
import torch

from paceline.core.errors import UnsupportedModel
from paceline.models.families.read import read_config
from paceline.models.weights.checkpoint import Checkpoint
from paceline.models.weights.safetensors import FolderWeights, open_folder
from paceline.tools.train.target import Target
from tests.models.tiny import build
from tests.tools.train.tiny import some_ids


@pytest.mark.parametrize("family", ["llama", "llama-tied", "llama3-rope", "qwen2", "qwen3"])
def test_states_match_transformers(family: str, tmp_path: Path) -> None:
    reference = build(family)
    reference.save_pretrained(tmp_path)
    config = read_config(reference.config.to_dict())
    checkpoint = Checkpoint(family, config, FolderWeights(tmp_path), lambda: pytest.fail("no tokenizer here"))
    target = Target(checkpoint, torch.device("cpu"), torch.float32)
    ids = some_ids(2, 20) % 160
    with torch.no_grad():
        expected = reference(ids, output_hidden_states=True)
    found = target.states(ids, state_layers=(0, 1, 2))
    assert found.inner is not None
    torch.testing.assert_close(found.inner, torch.cat(expected.hidden_states[:3], -1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.last @ target.head.T, expected.logits, rtol=1e-4, atol=1e-4)


def test_steps_match_whole_rows(target: Target) -> None:
    ids = some_ids(3, 140)  # over a cache step
    whole = target.states(ids).last @ target.head.T
    cache = target.new_cache(3, 140)
    for position in range(140):
        width = 128 if position < 128 else 256
        logits = target.step(ids[:, position], torch.tensor([position]), cache, width)
        torch.testing.assert_close(logits, whole[:, position], rtol=1e-4, atol=1e-4)


def test_too_long_rows_are_rejected(target: Target) -> None:
    target.check_length(512)
    with pytest.raises(UnsupportedModel, match="--length 512"):
        target.check_length(513)


@pytest.mark.parametrize(("row", "family"), [("gemma3", "gemma3_text"), ("smollm3", "smollm3"), ("phi3", "phi3")])
def test_other_families_are_refused(tmp_path: Path, row: str, family: str) -> None:
    build(row).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=rf"{family} targets; possible: llama, mistral, qwen2, qwen3"):
        Target(open_folder(tmp_path), torch.device("cpu"), torch.float32)

"""Checkpoints for text and images: their text part is read, under the names of transformers 4 and 5."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from paceline.models.decoder.forward import DecoderModel
from paceline.models.families.read import read_config
from paceline.models.weights.safetensors import open_folder
from tests.models.paged import PagedRunner, relative_error
from tests.models.tiny import FAMILIES

IDS = torch.randint(0, 160, (1, 24), generator=torch.Generator().manual_seed(1))
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A folder with a Gemma 3 for text and images, and its logits."""
    torch.manual_seed(0)
    text = FAMILIES["gemma3"]().to_dict()
    config = Gemma3Config(text_config=text, vision_config=_VISION, mm_tokens_per_image=4, eos_token_id=[1, 106])
    model = Gemma3ForConditionalGeneration(config).eval()
    folder = tmp_path_factory.mktemp("both")
    model.save_pretrained(folder)
    with torch.inference_mode():
        return folder, model(IDS).logits[0]


def check(folder: Path, expected: torch.Tensor) -> None:
    checkpoint = open_folder(folder)
    model = DecoderModel(checkpoint.config, checkpoint.weights, torch.device("cpu"), torch.float32)
    with torch.inference_mode():
        logits = PagedRunner(model).step({0: IDS[0].tolist()}).logits
    assert relative_error(logits, expected) < 1e-4


def test_the_text_part_equals_that_of_transformers(saved: tuple[Path, torch.Tensor]) -> None:
    check(*saved)


def test_stop_tokens_of_the_whole_and_of_the_text_part_count(saved: tuple[Path, torch.Tensor]) -> None:
    assert set(open_folder(saved[0]).config.eos_ids) == {1, 2, 106}


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_names_of_both_versions_are_read(prefix: str, saved: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    folder, expected = saved
    shutil.copy(folder / "config.json", tmp_path)
    renamed = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        text = name.split("language_model.")[-1].removeprefix("model.") if "language_model." in name else None
        renamed[name if text is None else prefix + text] = weight
    assert any(name.startswith(prefix) for name in renamed)
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    check(tmp_path, expected)


def test_values_that_published_configurations_leave_out() -> None:
    """Gemma 3 4B has neither the number of heads nor the size of the vocabulary."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    spec = read_config({"model_type": "gemma3", "text_config": text})
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262_208)
    assert spec.max_position == 131_072
    assert spec.tie_embeddings
    assert spec.full_layers == (5, 11, 17, 23, 29)

from pathlib import Path

import pytest
import torch

from paceline.core.errors import UnsupportedModel
from paceline.models.loading.load import load_model, open_checkpoint
from paceline.models.tokenizer.tokenizer import Tokenizer
from tests.models.loading.test_gguf_file import write_gguf
from tests.models.paged import PagedRunner
from tests.models.tiny import build


def test_a_folder_becomes_a_model_and_its_tokenizer(tmp_path: Path, smollm2: Tokenizer) -> None:
    build("qwen3").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(smollm2.to_json())
    threads = torch.get_num_threads()
    loaded = load_model(tmp_path, "cpu", torch.bfloat16)
    assert torch.get_num_threads() == threads
    assert loaded.name == tmp_path.name
    assert loaded.config.architecture == "qwen3"
    assert loaded.tokenizer.encode("Hi") == smollm2.encode("Hi")
    logits = PagedRunner(loaded.model).step({0: [3, 4, 5]}).logits
    assert logits is not None
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()


def test_a_folder_with_one_gguf(tmp_path: Path) -> None:
    write_gguf(tmp_path / "only.gguf", build("llama"))
    assert open_checkpoint(tmp_path).name == "only"
    assert open_checkpoint(tmp_path / "only.gguf").name == "only"
    (tmp_path / "second.gguf").touch()
    with pytest.raises(UnsupportedModel, match="name one of them"):
        open_checkpoint(tmp_path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UnsupportedModel, match="give the folder"):
        open_checkpoint(tmp_path / "model.safetensors")


def test_the_embedded_models_shape(smollm2: Tokenizer) -> None:
    config = open_checkpoint("smollm2").config
    assert config.num_parameters == 134_515_008
    assert config.vocab_size == smollm2.vocab_size
    assert config.kv_bytes_per_token(4) == 46_080

import shutil
from pathlib import Path

import pytest
import torch

from paceline.core.errors import OutOfMemory, UnsupportedModel
from paceline.kernels.rope import rotary_table_bytes
from paceline.model_files.tokenizer.tokenizer import Tokenizer
from paceline.models.loading import load
from paceline.models.loading.load import load_model, open_checkpoint, weight_bytes
from tests.engine.start.test_build import save_checkpoint
from tests.models.paged import PagedRunner
from tests.models.tiny import build
from tests.models.weights.test_gguf_file import write_gguf


def test_load_model_returns_model_and_tokenizer_of_a_folder(tmp_path: Path, smollm2: Tokenizer) -> None:
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


def test_a_folder_with_one_gguf_file_is_a_checkpoint(tmp_path: Path) -> None:
    write_gguf(tmp_path / "only.gguf", build("llama"))
    assert open_checkpoint(tmp_path).name == "only"
    assert open_checkpoint(tmp_path / "only.gguf").name == "only"
    (tmp_path / "second.gguf").touch()
    with pytest.raises(UnsupportedModel, match="give the path of one of them"):
        open_checkpoint(tmp_path)


def test_other_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UnsupportedModel, match="give the folder"):
        open_checkpoint(tmp_path / "model.safetensors")


def test_configuration_of_the_embedded_model(smollm2: Tokenizer) -> None:
    config = open_checkpoint("smollm2").config
    assert config.num_parameters == 134_515_008
    assert config.vocab_size == smollm2.vocab_size
    assert config.kv_bytes_per_token(4) == 46_080


CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


def test_a_model_that_does_not_fit_is_rejected_before_it_is_read(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(folder)
    needed = weight_bytes(folder, checkpoint, CPU, torch.float32, False)
    table = rotary_table_bytes(checkpoint.config.head_dim, checkpoint.config.max_position)
    monkeypatch.setattr(load, "available_memory", lambda: needed + table - 1)
    with pytest.raises(OutOfMemory, match=r"tiny does not fit: .* or quantization int8 or fp8"):
        load_model(folder)
    monkeypatch.setattr(load, "available_memory", lambda: needed + table)
    loaded = load_model(folder)
    assert loaded.model.weight_bytes == pytest.approx(needed, rel=0.1)


def test_other_files_in_the_folder_do_not_count(folder: str, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "consolidated.safetensors").write_bytes(b"0" * 10**6)
    first, second = (weight_bytes(path, open_checkpoint(path), CPU, torch.bfloat16, True) for path in (folder, copy))
    assert first == second
    first, second = (weight_bytes(path, open_checkpoint(path), CPU, torch.float32, False) for path in (folder, copy))
    assert first == second


def test_weight_bytes_of_an_inflated_model() -> None:
    name = "inflate:llama-70b?base=smollm2"
    checkpoint = open_checkpoint(name)
    assert weight_bytes(name, checkpoint, CPU, torch.bfloat16, False) == pytest.approx(138e9, rel=0.02)
    assert weight_bytes(name, checkpoint, CPU, torch.bfloat16, True) == pytest.approx(70e9, rel=0.02)


def test_attention_sinks_have_kernels_on_a_gpu(tmp_path: Path) -> None:
    build("gpt-oss").save_pretrained(tmp_path)
    model = load.build_model(open_checkpoint(tmp_path), torch.device("meta"), torch.bfloat16)
    assert model.layers[0].sinks is not None


def test_an_inflated_model_has_shapes_without_values() -> None:
    """Kernels are compiled ahead for it on the device `meta`."""
    checkpoint = open_checkpoint("inflate:llama-1b?base=smollm2&noise=0.06")
    model = load.build_model(checkpoint, torch.device("meta"), torch.bfloat16)
    assert model.layers[-1].qkv.shape[0] == checkpoint.config.heads.q_size + 2 * checkpoint.config.heads.kv_size

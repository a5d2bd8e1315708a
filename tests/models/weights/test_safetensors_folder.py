import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.core.errors import UnsupportedModel
from paceline.models.decoder.forward import DecoderModel
from paceline.models.weights import safetensors
from paceline.models.weights.safetensors import open_folder
from tests.models.paged import PagedRunner, relative_error
from tests.models.tiny import build

IDS = torch.randint(0, 160, (1, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    build("llama").save_pretrained(folder, max_shard_size="100KB")
    return folder


@torch.inference_mode()
def test_a_sharded_checkpoint_is_one_model(sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 2
    checkpoint = open_folder(sharded)
    model = DecoderModel(checkpoint.config, checkpoint.weights, torch.device("cpu"), torch.float32)
    logits = PagedRunner(model).step({0: IDS[0].tolist()}).logits
    assert relative_error(logits, build("llama")(IDS).logits[0]) < 1e-4


@torch.inference_mode()
def test_half_precision_weights_are_widened_exactly(tmp_path: Path) -> None:
    build("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    checkpoint = open_folder(tmp_path)
    model = DecoderModel(checkpoint.config, checkpoint.weights, torch.device("cpu"), torch.float32)
    logits = PagedRunner(model).step({0: IDS[0].tolist()}).logits
    assert relative_error(logits, reference(IDS).logits[0]) < 1e-4


def test_a_missing_shard_is_named(sharded: Path, tmp_path: Path) -> None:
    for file in sharded.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(UnsupportedModel, match=lost.name):
        open_folder(tmp_path)


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    build("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        open_folder(tmp_path)


def test_folders_without_a_model_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        open_folder(tmp_path)
    build("llama").config.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UnsupportedModel, match="safe_serialization"):
        open_folder(tmp_path)


def test_an_index_may_not_name_files_outside_its_folder(sharded: Path, tmp_path: Path) -> None:
    for file in sharded.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    index = tmp_path / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    name, shard = next(iter(values["weight_map"].items()))
    values["weight_map"][name] = f"../{sharded.name}/{shard}"
    index.write_text(json.dumps(values))
    with pytest.raises(UnsupportedModel, match="not in the folder"):
        open_folder(tmp_path)


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    build("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(95, 64)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"up_proj\.weight has the shape \(95, 64\).*\(96, 64\)"):
        open_folder(tmp_path)


def test_a_header_of_a_million_tensors_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("llama").save_pretrained(tmp_path)
    empty = {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(3000)}
    header = json.dumps(empty).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    monkeypatch.setattr(safetensors, "safe_open", None)
    for limit, most in (("_MAX_TENSORS", 1000), ("_MAX_HEADER_BYTES", 10_000)):
        monkeypatch.setattr(safetensors, limit, most)
        with pytest.raises(UnsupportedModel, match=f"at most {most}"):
            open_folder(tmp_path)

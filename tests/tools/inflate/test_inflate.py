import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from paceline.cli.commands import cli
from paceline.core.errors import InvalidRequest
from paceline.kernels.formats.quantized import Quantization
from paceline.model_files.hub.hub import SHAPES, InflatedShape, Inflation
from paceline.models.decoder.forward import DecoderModel
from paceline.models.loading.load import load_model, open_checkpoint
from paceline.models.weights.checkpoint import Checkpoint
from paceline.tools.inflate import inflate as writer
from paceline.tools.inflate.inflate import make, write_folder
from tests.cli.fakes import word_tokenizer
from tests.models.paged import PagedRunner, relative_error
from tests.models.tiny import build

WIDE = InflatedShape(hidden_size=192, num_layers=4, num_heads=12, num_kv_heads=4, head_dim=32, ffn_size=256)
IDS = [3, 100, 4, 77, 12, 9, 150, 0, 31]


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(SHAPES, "wide", WIDE)
    build("llama3-rope").save_pretrained(tmp_path / "small")
    writer.write_tokenizer(word_tokenizer(), open_checkpoint(tmp_path / "small").config, tmp_path / "small")
    return tmp_path / "small"


def logits(checkpoint: Checkpoint) -> Tensor:
    model = DecoderModel(checkpoint.config, checkpoint.weights, torch.device("cpu"), torch.float32)
    rows = PagedRunner(model).step({0: IDS}).logits
    assert rows is not None
    return rows


def test_folder_computes_the_same_model(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "SHARD_BYTES", 400_000)
    large = make(Inflation("wide", str(base), noise=0.05, seed=2), torch.device("cpu"), torch.float32)
    heard: list[tuple[int, int]] = []
    size = write_folder(large, tmp_path / "large", lambda done, of: heard.append((done, of)))
    assert heard[-1] == (len(large.weights.names()),) * 2
    assert size == 4 * large.config.num_parameters
    assert len([*(tmp_path / "large").glob("*.safetensors")]) > 1
    loaded = load_model(tmp_path / "large")
    assert loaded.tokenizer.encode("one two") == word_tokenizer().encode("one two")
    assert 0 in loaded.tokenizer.eos_ids
    ours = PagedRunner(loaded.model).step({0: IDS}).logits
    assert ours is not None
    assert torch.equal(ours, logits(large))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "large", dtype=torch.float32).eval()
    with torch.inference_mode():
        assert relative_error(ours, theirs(torch.tensor([IDS])).logits[0]) < 1e-4


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized_folder_matches_quantization(kind: Quantization, base: Path, tmp_path: Path) -> None:
    what = Inflation("wide", str(base))
    size = write_folder(make(what, torch.device("cpu"), torch.bfloat16, kind), tmp_path / "large")
    folder, made = open_checkpoint(tmp_path / "large"), make(what, torch.device("cpu"), torch.bfloat16, kind)
    assert size < 1.4 * folder.config.num_parameters
    assert relative_error(logits(folder), logits(made)) < 1e-5
    exact = make(what, torch.device("cpu"), torch.float32)
    assert 1e-4 < relative_error(logits(folder), logits(exact)) < 0.3


def test_no_overwrite_and_no_partial_folder(base: Path, tmp_path: Path) -> None:
    large = make(Inflation("wide", str(base)), torch.device("cpu"), torch.float32)

    def interrupt(done: int, of: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(large, tmp_path / "large", interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    (tmp_path / "large").mkdir()
    with pytest.raises(InvalidRequest, match="exists"):
        write_folder(large, tmp_path / "large")
    (tmp_path / "other.part").mkdir()
    with pytest.raises(InvalidRequest, match=r"other\.part is left from an interrupted run"):
        write_folder(large, tmp_path / "other")


def test_command(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "large"
    options = ("--base", str(base), "--noise", "0.05", "--seed", "7", "--quantization", "fp8", "--out", str(out))
    result = CliRunner().invoke(cli, ("bench", "inflate", "--shape", "wide", *options))
    assert result.exit_code == 0, result.output
    assert "billion weights" in result.stdout
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "compressed-tensors"
    assert open_checkpoint(out).config.hidden_size == 192
    assert not (tmp_path / "large.part").exists()
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1  # all files have the same permissions
    refused = CliRunner().invoke(cli, ("bench", "inflate", "--shape", "huge", "--out", str(tmp_path / "other")))
    assert refused.exit_code == 2
    assert "choose from: llama-1b" in refused.stderr
    assert not (tmp_path / "other").exists()

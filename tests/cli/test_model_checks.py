"""What `doctor` says a model will take, of models that are made or rounded as they are loaded."""

from pathlib import Path

import pytest
import torch

from paceline.bench.inflate import make, write_folder, write_tokenizer
from paceline.cli.model_checks import sketch
from paceline.models.architectures import inflate as shapes
from paceline.models.architectures.inflation import SHAPES, Inflation, Shape
from paceline.models.loading.load import load_model, open_checkpoint
from tests.cli.fakes import word_tokenizer
from tests.models.tiny import build

BF16 = torch.bfloat16


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    wide = Shape(hidden_size=512, num_layers=4, num_heads=16, num_kv_heads=4, head_dim=32, ffn_size=1024)
    monkeypatch.setattr(shapes, "SHAPES", SHAPES | {"wide": wide})
    build("llama").save_pretrained(tmp_path / "small")
    write_tokenizer(word_tokenizer(), open_checkpoint(tmp_path / "small").config, tmp_path / "small")
    return tmp_path / "small"


@pytest.mark.parametrize("kind", [None, "fp8"])
def test_a_model_that_is_made(kind, small: Path) -> None:
    name = f"inflate:wide?base={small}"
    guess = sketch(name, torch.device("cpu"), BF16, quantize=kind is not None).model.weight_bytes
    assert guess == pytest.approx(load_model(name, "cpu", BF16, kind).model.weight_bytes, rel=0.02)


def test_a_folder_in_eight_bits(small: Path, tmp_path: Path) -> None:
    write_folder(make(Inflation("wide", str(small)), torch.device("cpu"), BF16, "fp8"), tmp_path / "large")
    guess = sketch(str(tmp_path / "large"), torch.device("cpu"), BF16).model.weight_bytes
    assert guess == pytest.approx(load_model(tmp_path / "large", "cpu", BF16).model.weight_bytes, rel=0.02)

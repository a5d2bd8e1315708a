"""An inflated model has the logits of the small model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.rope import FrequencyFactors
from paceline.model_files.hub.hub import SHAPES, InflatedShape, Inflation
from paceline.model_files.tokenizer.tokenizer import Tokenizer
from paceline.models.decoder.forward import DecoderModel
from paceline.models.families.read import read_config
from paceline.models.loading.inflated import inflate, inflated_config
from paceline.models.loading.load import load_model, open_checkpoint
from paceline.models.weights.checkpoint import Checkpoint
from paceline.models.weights.safetensors import open_folder
from tests.models.paged import PagedRunner
from tests.models.tiny import build, spec
from tests.models.weights.test_gguf_file import write_gguf
from tests.specs import changed

WIDE = InflatedShape(hidden_size=160, num_layers=5, num_heads=12, num_kv_heads=4, head_dim=32, ffn_size=256)
IDS = torch.randint(0, 160, (40,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, InflatedShape]:
    tiny = {"wide": WIDE, "same-heads": replace(WIDE, head_dim=16), "no-more-layers": replace(WIDE, num_layers=1)}
    for name, shape in tiny.items():
        monkeypatch.setitem(SHAPES, name, shape)
    return tiny


def small(family: str, folder: Path) -> Checkpoint:
    build(family).save_pretrained(folder)
    return open_folder(folder)


def logits(checkpoint: Checkpoint, ids: list[int] = IDS) -> Tensor:
    model = DecoderModel(checkpoint.config, checkpoint.weights, torch.device("cpu"), torch.float32)
    rows = PagedRunner(model).step({0: ids}).logits
    assert rows is not None
    return rows


def difference(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        *((family, "wide") for family in ("llama", "llama-tied", "llama3-rope", "mistral-window")),
        *(("llama", shape) for shape in ("same-heads", "no-more-layers")),
    ],
)
def test_inflation_does_not_change_the_function(
    family: str, shape: str, tmp_path: Path, shapes: Mapping[str, InflatedShape]
) -> None:
    base = small(family, tmp_path)
    large = inflate(base, Inflation(shape), "cpu", torch.float32)
    assert large.config.num_layers == max(shapes[shape].num_layers, base.config.num_layers)
    assert large.config.hidden_size == 160
    assert difference(logits(large), logits(base)) < 1e-5


def test_frequency_factors_of_a_gguf_are_repeated(tmp_path: Path, shapes: Mapping[str, InflatedShape]) -> None:
    write_gguf(tmp_path / "small.gguf", build("llama"))
    base = open_checkpoint(tmp_path / "small.gguf")
    factors = FrequencyFactors(tuple(1.0 + i for i in range(base.config.head_dim // 2)))
    base = replace(base, config=changed(base.config, rope_scaling=factors))
    large = inflate(base, Inflation("wide"), "cpu", torch.float32)
    assert difference(logits(large), logits(base)) < 1e-5


def test_noise_changes_the_function_and_depends_on_the_seed_only(
    tmp_path: Path, shapes: Mapping[str, InflatedShape]
) -> None:
    base = small("llama", tmp_path)
    noisy = [inflate(base, Inflation("wide", noise=0.1, seed=seed), "cpu", torch.float32) for seed in (0, 0, 1)]
    same, again, other = (logits(checkpoint) for checkpoint in noisy)
    assert torch.equal(same, again)
    assert difference(same, other) > 0.01
    assert 0.01 < difference(same, logits(base)) < 0.5
    # noise is added to the small matrices: the shape does not matter
    elsewhere = inflate(base, Inflation("same-heads", noise=0.1), "cpu", torch.float32)
    assert difference(logits(elsewhere), same) < 1e-5


def test_matrices_are_mostly_random_and_have_the_dtype(tmp_path: Path, shapes: Mapping[str, InflatedShape]) -> None:
    """All but the embedding and the two output projections are random where the small model has no weights."""
    large = inflate(small("llama", tmp_path), Inflation("wide"), "cpu", torch.bfloat16)
    for name in sorted(large.weights.names()):
        if name.endswith("norm.weight"):
            continue
        values = large.weights.matrix(name).values
        assert values.dtype == torch.bfloat16
        must_be_zero = name.split(".")[-2] in ("embed_tokens", "o_proj", "down_proj")
        assert (((values != 0).float().mean() > 0.8).item()) is not must_be_zero, name


def test_a_name_describes_an_inflated_model(
    tmp_path: Path, smollm2: Tokenizer, shapes: Mapping[str, InflatedShape]
) -> None:
    small("llama", tmp_path)
    (tmp_path / "tokenizer.json").write_text(smollm2.to_json())
    loaded = load_model(f"inflate:wide?base={tmp_path}&noise=0.05&seed=3")
    assert loaded.config.ffn_size == 256
    assert loaded.tokenizer.encode("Hi") == smollm2.encode("Hi")
    assert Inflation.parse("inflate:llama-8b") == Inflation("llama-8b", "smollm2", 0.0, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("inflate:llama-9b", "choose from: llama-1b, llama-8b, llama-70b"),
        ("inflate:llama-8b?nois=0.1", "unknown parameter 'nois'"),
        ("inflate:llama-8b?noise=much", "noise must be a number"),
        ("inflate:llama-8b?noise=-1", "noise must be 0 or more"),
    ],
)
def test_invalid_names_are_rejected(name: str, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        Inflation.parse(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 32}, "hidden size 64 and the shape 32"),
        ({"num_kv_heads": 1, "num_heads": 12}, "key-value heads 2 and the shape 1"),
        ({"num_heads": 4}, "heads per key-value head 2 and the shape 1"),
        ({"head_dim": 24}, "heads of 16 do not fit evenly into heads of 24"),
    ],
)
def test_shapes_that_are_too_small_are_rejected(change: dict[str, int], message: str, tmp_path: Path) -> None:
    config = read_config(build("llama").config.to_dict())
    with pytest.raises(UnsupportedModel, match=message):
        inflated_config(config, replace(WIDE, **change))


@pytest.mark.parametrize("family", ["qwen3", "smollm3", "phi3"])
def test_models_with_other_heads_or_rotary_embeddings_are_rejected(family: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{family} models cannot be inflated"):
        inflated_config(spec(family), WIDE)


def test_the_published_shapes() -> None:
    config = open_checkpoint("inflate:llama-8b").config
    tables = 2 * config.vocab_size * config.hidden_size
    assert config.num_parameters - tables == 6_979_588_096  # Llama 3 8B without embedding and head
    assert open_checkpoint("inflate:llama-1b").config.num_layers == 30  # the small model's

"""Shares of a loaded model have the bits that a rank reads from the checkpoint, and joined they are the whole model again."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.kernels.formats.linear import DenseWeight
from paceline.kernels.formats.quantized import Quantization, quantize
from paceline.kernels.formats.weights import Dense
from paceline.kernels.linear import prepare
from paceline.models.decoder.forward import DecoderModel
from paceline.models.loading.load import build_model, open_checkpoint
from paceline.models.manifest.manifest import piece_form, piece_tensors
from paceline.models.manifest.parts import Parts, Piece, part_of
from paceline.models.parallel.commands import RankSpec
from paceline.models.parallel.weights import PieceSplit, can_join
from paceline.models.shards.shards import Shard, split_obstacle
from tests.models.tiny import FAMILIES, ROW_OF, build, spec
from tests.models.weights.test_gguf_file import write_gguf

CPU = torch.device("cpu")


def wide_llama() -> PreTrainedModel:
    """A model whose shares of two ranks have whole groups of 32 inputs."""
    config = FAMILIES["llama"]()
    config.intermediate_size = 128
    torch.manual_seed(0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return made


def model(path: Path, rank: int | None, spec: RankSpec) -> DecoderModel:
    shard = None if rank is None else Shard(rank, spec.size, lambda part: part)
    return build_model(open_checkpoint(path), CPU, spec.dtype, spec.quantization, spec.activations, shard)


def assert_same(one: Mapping[str, Piece], other: Mapping[str, Piece]) -> None:
    for name, piece in one.items():
        assert piece_form(name, piece) == piece_form(name, other[name])
        assert all(map(torch.equal, piece_tensors(piece), piece_tensors(other[name]))), name


@pytest.mark.parametrize("size", [2, 4])  # 4 ranks share 2 key-value heads
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [row for row in ROW_OF.values() if row and split_obstacle(spec(row)) is None])
def test_shares_are_those_of_the_checkpoint(family: str, dtype: torch.dtype, size: int, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path)
    check(tmp_path, RankSpec("m", size, CPU, dtype))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantised_weights_stay_quantised(kind: Quantization, tmp_path: Path) -> None:
    wide_llama().save_pretrained(tmp_path)
    check(tmp_path, RankSpec("m", 2, CPU, torch.float32, kind))
    check(tmp_path, RankSpec("m", 2, CPU, torch.bfloat16, kind))


def test_codes_of_a_gguf_stay_codes(tmp_path: Path) -> None:
    for kind in (GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1):
        path = tmp_path / f"{kind.name}.gguf"
        write_gguf(path, wide_llama(), kind)
        check(path, RankSpec("m", 2, CPU, torch.float32))


def check(path: Path, spec: RankSpec) -> None:
    config = open_checkpoint(path).config
    split, whole = PieceSplit(config, spec), model(path, None, spec)
    ranks = [model(path, rank, spec) for rank in range(spec.size)]
    for part in range(1, Parts.of(config).count):
        pieces = part_of(whole, part)
        shares = split.divide(pieces)
        for share, rank in zip(shares, ranks, strict=True):
            assert_same(share, part_of(rank, part))
        assert_same(split.join(shares), pieces)
        assert Parts.of(config).tables == part or can_join(shares[0])


def test_a_cut_group_cannot_be_joined() -> None:
    values = torch.randn(64, 64)
    whole = {name: prepare(quantize(values, "int8"), CPU, torch.float32) for name in ("qkv", "gate_up", "output")}
    assert can_join({**whole, "down": whole["output"]})
    assert not can_join({**whole, "down": DenseWeight(values)})
    assert not can_join({**whole, "down": prepare(Dense(values), CPU, torch.float32)})

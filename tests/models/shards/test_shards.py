"""Ranks in one process: each computes its share of a layer, and the sum is the output of the whole layer."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.core.errors import InvalidConfig
from paceline.kernels.formats.quantized import Quantization
from paceline.models.loading.load import build_model, open_checkpoint
from paceline.models.shards.shards import Shard, ShardedWeights, check_split, shard_config, split_obstacle
from tests.fakes import TINY
from tests.models.paged import PagedRunner, relative_error
from tests.models.tiny import FAMILIES, build, spec
from tests.models.weights.test_gguf_file import write_gguf
from tests.specs import changed, with_heads

IDS = [3, 17, 99, 4, 150, 62, 8]


class ThreadReduce:
    """`reduce` of a group whose ranks are threads."""

    def __init__(self, size: int) -> None:
        self._barrier, self._parts = threading.Barrier(size, timeout=30), [torch.empty(0)] * size

    def reduce(self, rank: int, part: Tensor) -> Tensor:
        self._parts[rank] = part
        self._barrier.wait()
        total = torch.stack(self._parts).sum(0)
        self._barrier.wait()
        return total


def run_ranks(folder: Path, size: int, quantization: Quantization | None = None) -> list[Tensor]:
    """Hidden states after the last layer, of every rank."""
    checkpoint, group = open_checkpoint(folder), ThreadReduce(size)
    last = checkpoint.config.num_layers

    def run(rank: int) -> Tensor:
        shard = Shard(rank, size, lambda part: group.reduce(rank, part))
        model = build_model(checkpoint, torch.device("cpu"), torch.float32, quantization, "float32", shard)
        return PagedRunner(model).step({0: IDS}, state_layers=(last,)).hidden_by_layer[last]

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def run_whole(folder: Path, quantization: Quantization | None = None) -> Tensor:
    checkpoint = open_checkpoint(folder)
    model = build_model(checkpoint, torch.device("cpu"), torch.float32, quantization, "float32")
    last = checkpoint.config.num_layers
    return PagedRunner(model).step({0: IDS}, state_layers=(last,)).hidden_by_layer[last]


@pytest.mark.parametrize("family", [row for row in FAMILIES if split_obstacle(spec(row)) is None])
def test_two_ranks_equal_the_whole_model(family: str, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path)
    whole = run_whole(tmp_path)
    for state in run_ranks(tmp_path, 2):
        assert relative_error(state, whole) < 1e-5


def test_four_ranks_share_two_key_value_heads(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    whole = run_whole(tmp_path)
    for state in run_ranks(tmp_path, 4):
        assert relative_error(state, whole) < 1e-5


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantised_weights_do_not_depend_on_the_number_of_ranks(kind: Quantization, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    whole = run_whole(tmp_path, kind)
    assert relative_error(whole, run_whole(tmp_path)) > 1e-3
    for state in run_ranks(tmp_path, 2, kind):
        assert relative_error(state, whole) < 1e-5


def test_groups_of_a_gguf_are_sliced_or_unpacked(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", build("llama"))
    whole = run_whole(tmp_path / "m.gguf")
    for size in (2, 4):  # 96 / 4 inputs of down_proj are not a multiple of 32
        assert relative_error(run_ranks(tmp_path / "m.gguf", size)[0], whole) < 1e-5


def test_every_weight_is_on_exactly_one_rank(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    shards = [
        ShardedWeights(checkpoint.weights, checkpoint.config, Shard(rank, 2, lambda part: part)) for rank in range(2)
    ]
    for name in sorted(checkpoint.weights.names()):
        if not name.endswith("_proj.weight"):
            continue
        whole = checkpoint.weights.matrix(name).dequantize()
        parts = [shard.matrix(name).dequantize() for shard in shards]
        assert torch.equal(torch.cat(parts, 1 if name.split(".")[-2] in ("o_proj", "down_proj") else 0), whole)


@pytest.mark.parametrize(
    ("change", "size", "possible"),
    [
        ({}, 3, "possible: 1, 2, 4"),
        ({"num_heads": 9, "num_kv_heads": 3, "ffn_size": 1536}, 2, "possible: 1, 3"),
        ({"num_heads": 12, "num_kv_heads": 3, "ffn_size": 96}, 2, "possible: 1, 3, 6, 12"),
        ({"ffn_size": 66}, 4, "possible: 1, 2"),
    ],
)
def test_an_uneven_split_is_rejected_with_the_possible_sizes(change: dict[str, int], size: int, possible: str) -> None:
    config = changed(TINY, **change)
    with pytest.raises(InvalidConfig, match=f"tensor_parallel_size {size}: .*{possible}$"):
        check_split(config, size)


def test_shard_config() -> None:
    large = changed(TINY, num_heads=64, num_kv_heads=8, ffn_size=28672)
    share = shard_config(large, 4)
    assert (share.num_heads, share.num_kv_heads, share.ffn_size) == (16, 2, 7168)
    assert shard_config(large, 16).num_kv_heads == 1


def test_what_ranks_cannot_share_is_named() -> None:
    experts = changed(TINY, architecture="qwen3_moe", num_experts=4, experts_per_token=2)
    check_split(experts, 1)
    with pytest.raises(InvalidConfig, match="bias on the output"):
        check_split(changed(TINY, output_bias=True), 2)
    with pytest.raises(InvalidConfig, match="a norm of all heads"):
        check_split(with_heads(TINY, has_joined_qk_norm=True), 2)
    with pytest.raises(InvalidConfig, match="experts \\(qwen3_moe\\) run on one device"):
        check_split(experts, 2)

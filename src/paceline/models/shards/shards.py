"""One rank's share of a tensor-parallel model.

q, k, v, gate and up are split by output, o and down by input, so that a layer needs two sums over the ranks:

    attention     a rank has H / n query heads and their key-value heads: KV / n of them, or one that n / KV ranks share
    feed-forward  a rank has F / n of the inner width

Every rank has the whole embedding and all norms. Rank 0 has the whole head and samples: logits are never transferred, at the
cost of the head's memory and time on one device.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from paceline.core.errors import InvalidConfig
from paceline.kernels.formats.weights import Weight, columns, rows
from paceline.models.families import ModelConfig
from paceline.models.weights import Weights

LARGEST_GROUP = 16
"""Largest group size that an error message suggests."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """Rank `rank` of `size`. `reduce` returns the sum over all ranks."""

    rank: int
    size: int
    reduce: Callable[[Tensor], Tensor]


def can_split(config: ModelConfig, size: int) -> bool:
    kv_heads = config.num_kv_heads
    shares_heads = kv_heads % size == 0 or size % kv_heads == 0
    return config.num_heads % size == 0 and config.ffn_size % size == 0 and shares_heads


def check_split(config: ModelConfig, size: int) -> None:
    """Raise `InvalidConfig` unless heads and feed-forward layer can be split evenly over `size` ranks."""
    if config.num_experts and size > 1:
        raise InvalidConfig(
            f"tensor_parallel_size {size}: models with experts ({config.architecture}) run on one device; use size 1"
        )
    if can_split(config, size):
        return
    possible = [str(n) for n in range(1, LARGEST_GROUP + 1) if can_split(config, n)]
    raise InvalidConfig(
        f"tensor_parallel_size {size}: {config.num_heads} heads, {config.num_kv_heads} key-value heads and a feed-forward "
        f"layer of {config.ffn_size} cannot be split evenly; possible: {', '.join(possible)}"
    )


def shard_config(config: ModelConfig, size: int) -> ModelConfig:
    """Configuration of one rank's share."""
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(config.num_kv_heads // size, 1),
        ffn_size=config.ffn_size // size,
    )


class ShardedWeights:
    """`Weights` of one rank: slices of the weights of the whole model."""

    def __init__(self, weights: Weights, config: ModelConfig, shard: Shard) -> None:
        """`config` is the configuration of the whole model."""
        self._weights = weights
        own, width = shard_config(config, shard.size), config.head_dim
        query, inner = shard.rank * own.q_size, shard.rank * own.ffn_size
        # if ranks share a key-value head, the queries of this rank read head `rank * KV // size`
        key = shard.rank * config.num_kv_heads // shard.size * width
        self._outputs = {
            "q_proj": (query, query + own.q_size),
            "k_proj": (key, key + own.kv_size),
            "v_proj": (key, key + own.kv_size),
            "gate_proj": (inner, inner + own.ffn_size),
            "up_proj": (inner, inner + own.ffn_size),
        }
        self._inputs = {"o_proj": self._outputs["q_proj"], "down_proj": self._outputs["up_proj"]}

    def names(self) -> frozenset[str]:
        return self._weights.names()

    def matrix(self, name: str) -> Weight:
        weight, role = self._weights.matrix(name), name.split(".")[-2]
        if role in self._outputs:
            return rows(weight, *self._outputs[role])
        if role in self._inputs:
            return columns(weight, *self._inputs[role])
        return weight

    def vector(self, name: str) -> Tensor:
        values, role = self._weights.vector(name), name.split(".")[-2]
        if role in self._outputs:  # a bias
            start, stop = self._outputs[role]
            return values[start:stop]
        return values

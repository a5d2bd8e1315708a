"""One rank's share of a model whose layers are split over several devices.

q, k, v, gate and up are split by output, o and down by input, so a layer needs two sums over the ranks and nothing else:

    attention     a rank has H / n query heads, and the key-value heads they read: KV / n of them, or one, of which
                  n / KV ranks then have a copy
    feed-forward  a rank has F / n of the inner width

Embedding and norms are whole on every rank. The head is whole on rank 0 alone, which samples: no logits ever travel, at
the price of the head's memory and time on one device.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from paceline.core.errors import InvalidConfig
from paceline.kernels.weights import Weight, columns, rows
from paceline.models.architectures.config import ModelConfig
from paceline.models.loading.checkpoint import Weights

LARGEST_GROUP = 16
"""Ranks that advice goes up to."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """Rank `rank` of `size`; `reduce` gives the sum of what all ranks hand in."""

    rank: int
    size: int
    reduce: Callable[[Tensor], Tensor]


def can_split(config: ModelConfig, size: int) -> bool:
    kv_heads = config.num_kv_heads
    shares_heads = kv_heads % size == 0 or size % kv_heads == 0
    return config.num_heads % size == 0 and config.ffn_size % size == 0 and shares_heads


def check_split(config: ModelConfig, size: int) -> None:
    """Raise unless every rank would get as many heads and as much of the feed-forward layer as every other."""
    if can_split(config, size):
        return
    possible = [str(n) for n in range(1, LARGEST_GROUP + 1) if can_split(config, n)]
    raise InvalidConfig(
        f"tensor_parallel_size {size}: {config.num_heads} heads, {config.num_kv_heads} key-value heads and a feed-forward "
        f"layer of {config.ffn_size} cannot be split evenly; possible: {', '.join(possible)}"
    )


def shard_config(config: ModelConfig, size: int) -> ModelConfig:
    """The shape of one rank's share."""
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(config.num_kv_heads // size, 1),
        ffn_size=config.ffn_size // size,
    )


class ShardedWeights:
    """`Weights` of one rank, cut out of the whole model's."""

    def __init__(self, weights: Weights, config: ModelConfig, shard: Shard) -> None:
        """`config` is the whole model's."""
        self._weights = weights
        own, width = shard_config(config, shard.size), config.head_dim
        query, inner = shard.rank * own.q_size, shard.rank * own.ffn_size
        # where a key-value head is on several ranks, `rank * KV // size` is the one that this rank's queries read
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

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
from paceline.models.families.layers import LayerSpec
from paceline.models.families.spec import DecoderSpec
from paceline.models.families.tensors import Divided
from paceline.models.weights import Weights

LARGEST_GROUP = 16
"""Largest group size that an error message suggests."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """Rank `rank` of `size`. `reduce` returns the sum over all ranks."""

    rank: int
    size: int
    reduce: Callable[[Tensor], Tensor]


def can_split(config: DecoderSpec, size: int) -> bool:
    kv_heads = config.num_kv_heads
    shares_heads = kv_heads % size == 0 or size % kv_heads == 0
    return config.num_heads % size == 0 and config.ffn_size % size == 0 and shares_heads


def split_obstacle(config: DecoderSpec) -> str | None:
    """What the layers have that ranks cannot share. None if there is nothing."""
    if config.experts is not None:
        return "experts"
    if config.heads.latent is not None:
        return "latent attention"
    if config.heads.own is not None:
        return "heads of two sizes"
    if config.heads.has_joined_qk_norm:  # a rank has some of the heads
        return "a norm of all heads"
    if config.heads.has_output_bias:  # every rank would add it
        return "a bias on the output of attention"
    return None


def check_split(config: DecoderSpec, size: int) -> None:
    """Raise `InvalidConfig` unless heads and feed-forward layer can be split evenly over `size` ranks."""
    obstacle = split_obstacle(config)
    if obstacle is not None and size > 1:
        raise InvalidConfig(
            f"tensor_parallel_size {size}: models with {obstacle} ({config.architecture}) run on one device; use size 1"
        )
    if can_split(config, size):
        return
    possible = [str(n) for n in range(1, LARGEST_GROUP + 1) if can_split(config, n)]
    raise InvalidConfig(
        f"tensor_parallel_size {size}: {config.num_heads} heads, {config.num_kv_heads} key-value heads and a feed-forward "
        f"layer of {config.ffn_size} cannot be split evenly; possible: {', '.join(possible)}"
    )


def shard_config(config: DecoderSpec, size: int) -> DecoderSpec:
    """Configuration of one rank's share."""
    layers = {layer: _share(layer, size) for layer in set(config.layers)}
    return replace(config, layers=tuple(layers[layer] for layer in config.layers))


def _share(layer: LayerSpec, size: int) -> LayerSpec:
    heads, ffn = layer.attention, layer.ffn
    own = replace(heads, num=heads.num // size, num_kv=max(heads.num_kv // size, 1))
    return replace(layer, attention=own, ffn=replace(ffn, width=ffn.width // size))


def rank_ranges(config: DecoderSpec, size: int, rank: int) -> dict[Divided, tuple[int, int]]:
    """The outputs or inputs of a weight that a rank has, for each way in which weights are divided. `config` is the
    configuration of the whole model."""
    own = shard_config(config, size)
    query, inner = rank * own.heads.q_size, rank * own.ffn_size
    # If ranks share a key-value head, the queries of this rank read head `rank * KV // size`
    key = rank * config.num_kv_heads // size * config.head_dim
    return {
        "query": (query, query + own.heads.q_size),
        "key_value": (key, key + own.heads.kv_size),
        "inner": (inner, inner + own.ffn_size),
    }


class ShardedWeights:
    """`Weights` of one rank: slices of the weights of the whole model."""

    def __init__(self, weights: Weights, config: DecoderSpec, shard: Shard) -> None:
        """`config` is the configuration of the whole model."""
        self._weights, self._config = weights, config
        self._ranges = rank_ranges(config, shard.size, shard.rank)

    def names(self) -> frozenset[str]:
        return self._weights.names()

    def matrix(self, name: str) -> Weight:
        weight, tensor = self._weights.matrix(name), self._config.tensor(name)
        if tensor is not None and tensor.outputs is not None:
            return rows(weight, *self._ranges[tensor.outputs])
        if tensor is not None and tensor.inputs is not None:
            return columns(weight, *self._ranges[tensor.inputs])
        return weight

    def vector(self, name: str) -> Tensor:
        values, tensor = self._weights.vector(name), self._config.tensor(name)
        if tensor is not None and tensor.outputs is not None:  # a bias
            start, stop = self._ranges[tensor.outputs]
            return values[start:stop]
        return values

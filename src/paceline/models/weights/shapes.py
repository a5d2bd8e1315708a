"""Shapes of the weights that a configuration requires, and weights without values, on the device `meta`.

The choice of kernels depends on types and shapes only.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.layout import META
from paceline.kernels.formats.quantized import Quantization, QuantizedWeight
from paceline.kernels.formats.weights import Activations, Dense, FourBit, Weight
from paceline.models.families import SCALES, ModelConfig
from paceline.models.weights.checkpoint import Checkpoint, Float32Activations, QuantizedWeights, Weights

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
"""Norms of a layer; those of the feed-forward layer only with output norms."""


class WeightShapes:
    """`Weights` of a checkpoint whose values are not read. Its 8-bit and 4-bit matrices stay what they are. Of 4-bit matrices
    the first with each role is read: all layers have the format of the first."""

    def __init__(self, weights: Weights, config: ModelConfig, has_four_bit: bool) -> None:
        self._weights, self._config, self._has_four_bit = weights, config, has_four_bit
        self._names = weights.names()
        self._first: dict[str, FourBit | None] = {}

    def names(self) -> frozenset[str]:
        return self._names

    def matrix(self, name: str) -> Weight:
        stem = name.removesuffix("weight")
        if any(stem + scale in self._names for scale in SCALES):
            stored = self._weights.matrix(name)  # a mapped file: no values are read
            assert isinstance(stored, QuantizedWeight)
            return QuantizedWeight(stored.values.to(META), stored.scales.to(META))
        outputs, inputs = self._shape(name)
        first = self._first_like(name)
        if first is not None:
            codes = torch.empty(outputs, inputs, dtype=first.codes.dtype, device=META)
            scales = torch.empty(outputs, inputs // first.group, device=META)
            return replace(first, codes=codes, scales=scales, offsets=None if first.offsets is None else scales)
        return Dense(torch.empty(outputs, inputs, dtype=torch.bfloat16, device=META))

    def _first_like(self, name: str) -> FourBit | None:
        """The first matrix with the role of `name` in its layer; None if it does not have 4 bits."""
        role = name.split(".")[-2]
        if role not in self._first:
            is_candidate = self._has_four_bit and name.startswith("model.layers.")
            stored = self._weights.matrix(name) if is_candidate else None
            self._first[role] = stored if isinstance(stored, FourBit) else None
        return self._first[role]

    def vector(self, name: str) -> Tensor:
        return torch.empty(weight_shape(self._config, name), device=META)

    def _shape(self, name: str) -> tuple[int, ...]:
        return weight_shape(self._config, name)


def weight_shape(config: ModelConfig, name: str) -> tuple[int, ...]:
    """Shape of a weight that `config` requires."""
    *_, owner, kind = name.split(".")
    if kind == "bias":
        shapes: dict[str, tuple[int, ...]] = {
            "q_proj": (config.q_size,),
            "k_proj": (config.kv_size,),
            "v_proj": (config.kv_size,),
            "o_proj": (config.hidden_size,),
            "gate": (config.num_experts,),
            "gate_proj": (config.ffn_size,),
            "up_proj": (config.ffn_size,),
            "down_proj": (config.hidden_size,),
        }
    elif kind == "sinks":
        shapes = {"self_attn": (config.num_heads,)}
    else:
        shapes = {
            "embed_tokens": (config.vocab_size, config.hidden_size),
            "lm_head": (config.vocab_size, config.hidden_size),
            "q_proj": (config.q_size, config.hidden_size),
            "k_proj": (config.kv_size, config.hidden_size),
            "v_proj": (config.kv_size, config.hidden_size),
            "o_proj": (config.hidden_size, config.q_size),
            "gate_proj": (config.ffn_size, config.hidden_size),
            "up_proj": (config.ffn_size, config.hidden_size),
            "down_proj": (config.hidden_size, config.ffn_size),
            "gate": (config.num_experts, config.hidden_size),
            "q_norm": (config.head_dim,),
            "k_norm": (config.head_dim,),
            **dict.fromkeys(("norm", *_NORMS), (config.hidden_size,)),
        }
    if owner not in shapes:
        raise UnsupportedModel(f"the shape of {name} is unknown: kernels cannot be compiled ahead for this model")
    return shapes[owner]


def check_weights(config: ModelConfig, shape: Callable[[str], tuple[int, ...]], has_tables: bool = True) -> None:
    """Raise `UnsupportedModel` for the first weight that is missing or has another shape than `config` requires.

    `shape` returns the shape of a stored weight. Without `has_tables` the checkpoint has neither embedding nor head.
    """
    for name in _required_names(config, has_tables):
        expected, found = weight_shape(config, name), shape(name)
        if expected != found:
            raise UnsupportedModel(f"{name} has the shape {found}, and the configuration requires {expected}")


def _required_names(config: ModelConfig, has_tables: bool) -> Iterator[str]:
    if has_tables:
        yield "model.embed_tokens.weight"
        if not config.tie_embeddings:
            yield "lm_head.weight"
    yield "model.norm.weight"
    in_layer = [f"{norm}.weight" for norm in _NORMS[: 4 if config.has_output_norms else 2]]
    in_layer += [f"self_attn.{part}_proj.weight" for part in "qkvo"]
    in_layer += [f"self_attn.{part}_proj.bias" for part in "qkv" if config.attention_bias]
    in_layer += [f"self_attn.{part}_norm.weight" for part in "qk" if config.qk_norm]
    kinds = ("weight", "bias") if config.output_bias else ("weight",)
    if config.output_bias:
        in_layer.append("self_attn.o_proj.bias")
    if config.has_sinks:
        in_layer.append("self_attn.sinks")
    owners = ["mlp"]
    if config.num_experts:
        in_layer += [f"mlp.gate.{kind}" for kind in kinds]
        owners = [f"mlp.experts.{i}" for i in range(config.num_experts)]
    in_layer += [f"{owner}.{part}_proj.{kind}" for owner in owners for part in ("gate", "up", "down") for kind in kinds]
    for layer in range(config.num_layers):
        yield from (f"model.layers.{layer}.{name}" for name in in_layer)


def checkpoint_weights(
    checkpoint: Checkpoint, device: torch.device, quantization: Quantization | None, activations: Activations
) -> Weights:
    """The weights of `checkpoint` as they are loaded with these options."""
    weights = checkpoint.weights
    if device.type == "meta":
        weights = WeightShapes(weights, checkpoint.config, checkpoint.has_four_bit)
    if quantization is not None:
        # Quantised before sharding, so that any number of ranks computes with the same values
        weights = QuantizedWeights(weights, quantization, device)
    if activations == "float32" and device.type == "cpu":
        weights = Float32Activations(weights)
    return weights

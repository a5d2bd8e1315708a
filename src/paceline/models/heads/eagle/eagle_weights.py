"""Configuration and weights of an EAGLE-3 head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.linear import LinearWeight
from paceline.kernels.formats.weights import concat
from paceline.kernels.linear import linear
from paceline.kernels.rope import RopeScaling, rotary_table
from paceline.model_files import Metadata
from paceline.models.decoder import DecoderModel, Layer
from paceline.models.families.flat import flat_spec
from paceline.models.families.read import read_config
from paceline.models.families.rope import rope_from_hf
from paceline.models.families.spec import DecoderSpec
from paceline.models.heads import Bits, DraftVocabulary, embedding_for, prepare_draft
from paceline.models.weights import Weights

_UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output")
"""Variants of published heads that change what enters or leaves the layer."""

CPU_BITS: Bits = 4
"""Bits of the weights on a CPU, where a level of drafts takes about as long as reading them."""


@dataclass(frozen=True, slots=True)
class EagleConfig:
    state_layers: tuple[int, ...]
    """Layers of the target whose hidden states enter `fc`; see `DecoderModel.forward`."""
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_before_residual: bool = False
    """Whether the residual is the normed state."""

    def __post_init__(self) -> None:
        if not self.state_layers or self.head_dim % 2 or self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(
                f"config.json of the draft has layers {self.state_layers}, heads of {self.head_dim} values and "
                f"{self.num_heads} heads for {self.num_kv_heads} key-value heads: no head has this shape"
            )

    def as_decoder(self, target: DecoderSpec) -> DecoderSpec:
        """The description of a decoder of one layer, as the head has."""
        return flat_spec(
            architecture="llama",
            vocab_size=target.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=1,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            ffn_size=self.ffn_size,
            rms_eps=self.rms_eps,
            rope_theta=self.rope_theta,
            max_position=target.max_position,
            rope_scaling=self.rope_scaling,
        )

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        return 2 * self.num_kv_heads * self.head_dim * bytes_per_value

    @classmethod
    def read(cls, config: Mapping[str, Any], target: DecoderSpec) -> "EagleConfig":
        """Reads config.json in the layout of Paceline or of `speculators`."""
        if "speculators_model_type" in config:
            return cls._published(config, target)
        fields = Metadata("config.json of the draft", config)
        return cls(
            state_layers=fields.token_ids("capture"),
            hidden_size=fields.count("hidden_size", 1 << 20),
            num_heads=fields.count("num_heads", 4096),
            num_kv_heads=fields.count("num_kv_heads", 4096),
            head_dim=fields.count("head_dim", 4096, least=2),
            ffn_size=fields.count("ffn_size", 1 << 20),
            rms_eps=fields.number("rms_eps", 0.0, 1.0),
            rope_theta=fields.number("rope_theta", 1.0, 1e12),
            rope_scaling=target.rotary[0].scaling,
        )

    @classmethod
    def _published(cls, config: Mapping[str, Any], target: DecoderSpec) -> "EagleConfig":
        if "norm_before_residual" not in config:
            raise UnsupportedModel(
                "config.json lacks norm_before_residual: both values are in use, add the one the head was trained with"
            )
        fields = Metadata("config.json of the draft", config)
        layer = config["transformer_layer_config"] if "transformer_layer_config" in fields else {}
        if fields.section("transformer_layer_config").count("num_hidden_layers", 4096, 1) != 1:
            raise UnsupportedModel(f"the EAGLE head has {layer['num_hidden_layers']} layers; supported: 1")
        for name in _UNSUPPORTED:
            if name in fields and fields.flag(name, False):
                raise UnsupportedModel(f"the EAGLE head has {name}, which is not supported: use a head without it")
        if layer.get("model_type", "llama") != "llama" or layer.get("attention_bias"):
            raise UnsupportedModel(
                f"the layer of the EAGLE head is of type {layer.get('model_type', 'llama')!r:.40}"
                f"{' with biases' if layer.get('attention_bias') else ''}; supported: llama without biases, for any target"
            )
        shape = read_config({"model_type": "llama", **layer})
        theta, scaling = rope_from_hf(layer)
        depth = target.num_layers
        return cls(
            # The published default if a checkpoint names no layers
            state_layers=fields.token_ids("eagle_aux_hidden_state_layer_ids") or (2, depth // 2, depth - 3),
            hidden_size=shape.hidden_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            ffn_size=shape.ffn_size,
            rms_eps=shape.rms_eps,
            rope_theta=theta,
            rope_scaling=scaling,
            norm_before_residual=fields.flag("norm_before_residual", False),
        )


class EagleWeights:
    """The weights of a head, on its target's device and in its dtype."""

    def __init__(self, config: EagleConfig, weights: Weights, target: DecoderModel) -> None:
        if not all(0 <= layer <= target.config.num_layers for layer in config.state_layers):
            raise UnsupportedModel(
                f"the head needs states after layers {config.state_layers}; the target has {target.config.num_layers} layers"
            )
        self.config, self.device, self.dtype = config, target.device, target.dtype
        self.vocabulary = DraftVocabulary.of(target, weights, config.hidden_size, CPU_BITS)
        self._weights = weights

        has_embedding = "embed_tokens.weight" in weights.names()
        d, heads = config.hidden_size, config.num_heads * config.head_dim
        shape = target.config.vocab_size, d
        self.embedding = self._matrix(shape, "embed_tokens") if has_embedding else embedding_for(target, d)
        self.fc = self._matrix((d, len(config.state_layers) * d), "fc")
        attention, mlp = "layers.0.self_attn", "layers.0.mlp"
        self.input_norm = self._vector("layers.0.input_layernorm")
        self.hidden_norm = self._vector("layers.0.hidden_norm")
        self.final_norm = self._vector("norm")
        shape = heads + 2 * config.num_kv_heads * config.head_dim, 2 * d
        matrices = {
            "qkv": self._matrix(shape, *(f"{attention}.{part}" for part in ("q_proj", "k_proj", "v_proj"))),
            "output": self._matrix((d, heads), f"{attention}.o_proj"),
            "gate_up": self._matrix((2 * config.ffn_size, d), f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            "down": self._matrix((d, config.ffn_size), f"{mlp}.down_proj"),
        }
        after_attention = {"post_attention_norm": self._vector("layers.0.post_attention_layernorm")}
        self.layer = Layer(config.as_decoder(target.config), 0, {**matrices, **after_attention})
        """The layer, whose input is the embedding and the state, both normed."""
        self.weight_bytes = self.fc.nbytes + sum(matrix.nbytes for matrix in self.layer.matrices)
        self.weight_bytes += self.vocabulary.nbytes
        self.weight_bytes += 0 if self.embedding is target.embedding else self.embedding.nbytes
        cos, sin = rotary_table(config.head_dim, config.rope_theta, config.rope_scaling, target.config.max_position)
        self.cos, self.sin = cos.to(self.device), sin.to(self.device)  # [max_position, hd / 2] float32

    def fuse(self, inner: Mapping[int, Tensor]) -> Tensor:
        """g [T, D] from the target's states, [T, D] each, or wider if the target is inflated."""
        width = self.config.hidden_size
        return linear(torch.cat([inner[layer][:, :width] for layer in self.config.state_layers], 1), self.fc)

    def _matrix(self, shape: tuple[int, int], *names: str) -> LinearWeight:
        """The matrices `names` joined by rows. Raises `UnsupportedModel` unless the result has `shape`."""
        parts = [self._weights.matrix(f"{name}.weight") for name in names]
        if (sum(part.shape[0] for part in parts), *{part.shape[1] for part in parts}) != shape:
            found = ", ".join(
                f"{name} {part.shape[0]} x {part.shape[1]}" for name, part in zip(names, parts, strict=True)
            )
            raise UnsupportedModel(
                f"config.json requires a matrix of {shape[0]} x {shape[1]}, and the weights have {found}"
            )
        return prepare_draft(concat(parts), self.device, self.dtype, CPU_BITS)

    def _vector(self, name: str) -> Tensor:
        values = self._weights.vector(f"{name}.weight")
        if values.shape != (self.config.hidden_size,):
            raise UnsupportedModel(
                f"{name} has the shape {tuple(values.shape)}, expected {self.config.hidden_size} values"
            )
        return values.to(self.device, self.dtype)

"""Configuration and weights of an EAGLE head."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.linear import LinearWeight
from paceline.kernels.linear import linear
from paceline.kernels.rms_norm import rms_norm
from paceline.kernels.rope import rotary_table
from paceline.models.decoder import DecoderModel
from paceline.models.families.spec import DecoderSpec
from paceline.models.families.tensors import layer_tensors
from paceline.models.heads import HeadLoader
from paceline.models.weights import Weights

StateNorm = Literal["none", "each", "joined", "final"]
"""The norm of the target's states: none, one for each state, one for all states joined, or the target's final norm."""

MAX_STATES, MAX_LAYERS = 16, 16
"""Most hidden states that a head reads, and most layers; published heads read up to 5 and have up to 4."""


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """What an EAGLE head computes. Version 3 normalizes the embedding and the state and joins them in front of its first layer.
    Version 1 joins them by `fc`, and its first layer has no input norm and its last layer no output norm."""

    state_layers: tuple[int, ...]
    """Hidden states of the target that the head reads, counted as in `DecoderModel.forward`."""
    decoder: DecoderSpec
    """The layers of the head."""
    state_size: int
    """Width of a state of the target."""
    version: Literal[1, 3] = 3
    state_norm: StateNorm = "none"
    norm_before_residual: bool = False
    """Whether the residual of the first layer is the normed state."""
    norm_output: bool = False
    """Whether the state of a drafted token is the output after the final norm."""
    has_fc_bias: bool = False

    def __post_init__(self) -> None:
        if not 1 <= len(set(self.state_layers)) == len(self.state_layers) <= MAX_STATES:
            raise UnsupportedModel(
                f"config.json of the draft names the hidden states {self.state_layers!s:.80}: "
                f"expected 1 to {MAX_STATES}, each once"
            )
        if not 1 <= self.decoder.num_layers <= MAX_LAYERS:
            raise UnsupportedModel(f"the head has {self.decoder.num_layers} layers: expected 1 to {MAX_LAYERS}")

    @property
    def hidden_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def ffn_size(self) -> int:
        return self.decoder.ffn_size

    @property
    def rms_eps(self) -> float:
        return self.decoder.rms_eps

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        return self.decoder.kv_bytes_per_token(bytes_per_value)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights by name, without embedding, head and vocabulary."""
        d, states = self.hidden_size, len(self.state_layers) * self.state_size
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (d, 2 * d if self.version == 1 else states)}
        if self.has_fc_bias:
            shapes["fc.bias"] = (d,)
        for number, layer in enumerate(self.decoder.layers):
            shapes |= {f"layers.{number}.{name}": tensor.shape for name, tensor in layer_tensors(d, layer).items()}
        if self.version == 1:
            del shapes["layers.0.input_layernorm.weight"]
        else:
            for part in "qkv":
                name = f"layers.0.self_attn.{part}_proj.weight"
                shapes[name] = (shapes[name][0], 2 * d)
            shapes |= {"norm.weight": (d,), "layers.0.hidden_norm.weight": (d,)}
        return shapes | dict.fromkeys(self.norm_names(), (states // max(1, len(self.norm_names())),))

    def norm_names(self) -> list[str]:
        """Names of the norms of the target's states that the head has."""
        each = [f"fc_norm.{number}.weight" for number in range(len(self.state_layers))]
        return {"each": each, "joined": ["input_norm.weight"]}.get(self.state_norm, [])


Norm = Callable[[Tensor, Tensor, float], Tensor]


class EagleWeights:
    """The weights of a head, on its target's device and in its dtype."""

    def __init__(self, config: EagleConfig, weights: Weights, target: DecoderModel) -> None:
        """`weights` have the names and shapes of `config.tensors()`."""
        self.config, self.device, self.dtype = config, target.device, target.dtype
        load, width = HeadLoader(weights, target), config.hidden_size
        self.vocabulary, self.embedding = load.vocabulary(width), load.embedding(width)
        self.fc = load.matrix("fc.weight")
        self.fc_bias = load.vector("fc.bias") if config.has_fc_bias else None
        self.state_norms = [load.vector(name) for name in config.norm_names()]
        self._state_eps = config.rms_eps
        if config.state_norm == "final":
            final = target.norms_after[-1]
            assert final is not None
            self.state_norms, self._state_eps = [final], target.config.rms_eps
        numbers = range(config.decoder.num_layers)
        self.layers = [load.layer(config.decoder, i, has_input_norm=i > 0) for i in numbers]
        """The layers. The input of the first is the embedding and the state, both normed, or what `fc` makes of the two."""
        if config.version == 3:
            self.input_norm = load.vector("layers.0.input_layernorm.weight")
            """The norm of the embedding."""
            self.hidden_norm = load.vector("layers.0.hidden_norm.weight")
            self.final_norm = load.vector("norm.weight")
        else:  # a pass always computes a norm after its last layer; here nothing reads it
            self.final_norm = torch.ones(width, dtype=self.dtype, device=self.device)
        self.weight_bytes = self.fc.nbytes + sum(m.nbytes for layer in self.layers for m in layer.matrices)
        self.weight_bytes += self.vocabulary.nbytes
        self.weight_bytes += 0 if self.embedding is target.embedding else self.embedding.nbytes
        rotary = config.decoder.rotary[0]
        cos, sin = rotary_table(rotary.size, rotary.theta, rotary.scaling, target.config.max_position)
        self.cos, self.sin = cos.to(self.device), sin.to(self.device)  # [max_position, hd / 2] float32

    @property
    def norms_after(self) -> list[Tensor | None]:
        """The norm after each layer."""
        return [*(layer.input_norm for layer in self.layers[1:]), self.final_norm]

    @property
    def has_final_norm(self) -> bool:
        """Whether the states that a pass returns are normalized before the product with the head."""
        return self.config.version == 3 and not self.config.norm_output

    def zero_states(self, rows: int) -> dict[int, Tensor]:
        """States of the target, by layer, for measurements."""
        zeros = torch.zeros(rows, self.config.state_size, dtype=self.dtype, device=self.device)
        return dict.fromkeys(self.config.state_layers, zeros)

    def fuse(self, inner: Mapping[int, Tensor]) -> Tensor:
        """g [T, D] from the target's states, [T, D] each, or wider if the target is inflated."""
        width = self.config.state_size
        return self.fuse_joined(torch.cat([inner[layer][:, :width] for layer in self.config.state_layers], 1))

    def fuse_joined(
        self, joined: Tensor, norm: Norm = rms_norm, product: Callable[[Tensor, LinearWeight], Tensor] = linear
    ) -> Tensor:
        """The same from the states of all layers in one tensor [T, L D]."""
        if self.config.state_norm == "each":
            parts = zip(joined.split(self.config.state_size, 1), self.state_norms, strict=True)
            joined = torch.cat([norm(part.contiguous(), weight, self._state_eps) for part, weight in parts], 1)
        elif self.state_norms:
            joined = norm(joined, self.state_norms[0], self._state_eps)
        return joined if self.config.version == 1 else product(joined, self.fc)

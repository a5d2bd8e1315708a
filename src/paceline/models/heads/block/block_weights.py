"""Configuration and weights of a block drafter, and its Markov head.

The Markov head of DSpark adds W2 (W1[previous token]) to the logits of a row, so that each token of a block depends on the one
before it. In the form `gated`, W1 is scaled by a gate of the row's state; in the form `rnn`, a recurrent state runs through the
block.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.linear import embedding_rows, linear
from paceline.kernels.rms_norm import rms_norm
from paceline.kernels.rope import rotary_table
from paceline.models.decoder import DecoderModel
from paceline.models.families.spec import DecoderSpec
from paceline.models.families.tensors import layer_tensors
from paceline.models.heads import HeadLoader
from paceline.models.weights import Weights

Markov = Literal["none", "vanilla", "gated", "rnn"]
MAX_BLOCK = 64
"""Most rows of a block; published drafters have up to 16."""
MAX_STATES, MAX_LAYERS = 16, 16


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """What a block drafter computes: one pass over a block of rows, the newest token and then mask tokens."""

    state_layers: tuple[int, ...]
    """Hidden states of the target that it reads, counted as in `DecoderModel.forward`."""
    decoder: DecoderSpec
    block_size: int
    """Rows of a block."""
    mask_id: int
    predicts_next: bool
    """Whether row j predicts the token after its position (DSpark); otherwise the token at its position, and row 0 predicts
    nothing (DFlash)."""
    markov: Markov = "none"
    markov_rank: int = 0

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
    def state_size(self) -> int:
        """Width of a state of the target."""
        return self.decoder.hidden_size

    @property
    def num_drafted(self) -> int:
        """Tokens that a block proposes."""
        return self.block_size if self.predicts_next else self.block_size - 1

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        return self.decoder.kv_bytes_per_token(bytes_per_value)

    def tensors(self, vocab_size: int, num_proposed: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights by name, without embedding, head and vocabulary."""
        d, r = self.hidden_size, self.markov_rank
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (d, len(self.state_layers) * d),
            "hidden_norm.weight": (d,),
            "norm.weight": (d,),
        }
        for number, layer in enumerate(self.decoder.layers):
            shapes |= {f"layers.{number}.{name}": tensor.shape for name, tensor in layer_tensors(d, layer).items()}
        if self.markov != "none":
            shapes |= {
                "markov_head.markov_w1.weight": (vocab_size, r),
                "markov_head.markov_w2.weight": (num_proposed, r),
            }
        if self.markov == "gated":
            shapes |= {"markov_head.gate_proj.weight": (r, d + r), "markov_head.gate_proj.bias": (r,)}
        if self.markov == "rnn":
            shapes |= {"markov_head.joint_proj.weight": (3 * r, 2 * r + d), "markov_head.joint_proj.bias": (3 * r,)}
        return shapes


@dataclass(frozen=True, slots=True, eq=False)
class MarkovState:
    """The recurrent states of a Markov head, one for each block."""

    values: Tensor  # [S, r]


class BlockWeights:
    """The weights of a block drafter, on its target's device and in its dtype."""

    def __init__(self, config: BlockConfig, weights: Weights, target: DecoderModel) -> None:
        """`weights` have the names and shapes of `config.tensors`."""
        self.config, self.device, self.dtype = config, target.device, target.dtype
        load, width = HeadLoader(weights, target), config.hidden_size
        self.vocabulary, self.embedding = load.vocabulary(width), load.embedding(width)
        self.fc = load.matrix("fc.weight")
        self.hidden_norm, self.final_norm = load.vector("hidden_norm.weight"), load.vector("norm.weight")
        self.layers = [load.layer(config.decoder, number) for number in range(config.decoder.num_layers)]
        self.input_norm = load.vector("layers.0.input_layernorm.weight")
        self.markov = {
            name: load.matrix(f"markov_head.{name}.weight")
            for name in ("markov_w1", "markov_w2", "gate_proj", "joint_proj")
            if f"markov_head.{name}.weight" in weights.names()
        }
        bias = {"gated": "gate_proj", "rnn": "joint_proj"}.get(config.markov)
        self.markov_bias = None if bias is None else load.vector(f"markov_head.{bias}.bias")
        matrices = [self.fc, *self.markov.values(), *(matrix for layer in self.layers for matrix in layer.matrices)]
        self.weight_bytes = sum(matrix.nbytes for matrix in matrices) + self.vocabulary.nbytes
        self.weight_bytes += 0 if self.embedding is target.embedding else self.embedding.nbytes
        rotary = config.decoder.rotary[0]
        cos, sin = rotary_table(rotary.size, rotary.theta, rotary.scaling, target.config.max_position)
        self.cos, self.sin = cos.to(self.device), sin.to(self.device)  # [max_position, hd / 2] float32

    @property
    def norms_after(self) -> list[Tensor | None]:
        """The norm after each layer."""
        return [*(layer.input_norm for layer in self.layers[1:]), self.final_norm]

    def context(self, joined: Tensor) -> Tensor:
        """What the keys and values of committed tokens are made of [T, D], from the target's states [T, L D]."""
        return rms_norm(linear(joined, self.fc), self.hidden_norm, self.config.decoder.rms_eps)

    def logits(
        self, normed: Tensor, previous: Tensor, state: MarkovState | None = None
    ) -> tuple[Tensor, MarkovState | None]:
        """[R, V'] float32 of rows [R, D] after the final norm, each after the token `previous` [R], and the state of the next
        rows. `state` is that of the rows, None for the first rows of their blocks."""
        logits = self.vocabulary.logits(normed)
        if self.config.markov == "none":
            return logits, None
        before = embedding_rows(self.markov["markov_w1"], previous)  # [R, r]
        if self.config.markov == "gated":
            joined = torch.cat((normed, before), 1)
            before = before * linear(joined, self.markov["gate_proj"], self.markov_bias).sigmoid()
        elif self.config.markov == "rnn":
            values = torch.zeros_like(before) if state is None else state.values
            joined = torch.cat((values, before, normed), 1)
            gate, candidate, output = linear(joined, self.markov["joint_proj"], self.markov_bias).chunk(3, 1)
            state = MarkovState(gate.sigmoid() * values + (1.0 - gate.sigmoid()) * candidate.tanh())
            before = output.tanh().contiguous()
        return logits + linear(before.contiguous(), self.markov["markov_w2"]).float(), state

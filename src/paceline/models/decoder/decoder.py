"""The weights of a decoder as a pass reads them, and the hidden states that a pass returns.

`DecoderWeights` holds fused matrices on a device, norms, and the rotary table. `HiddenStates` holds the states of chosen rows
of a pass, by layer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from paceline.kernels.formats.experts import Experts, Routing
from paceline.kernels.formats.four_bit import FourBitWeight, pack
from paceline.kernels.formats.four_bit import concat as concat_four_bit
from paceline.kernels.formats.linear import DenseWeight, LinearWeight
from paceline.kernels.formats.quantized import QuantizedWeight
from paceline.kernels.formats.weights import Dense, FourBit, Weight, concat
from paceline.kernels.linear import embedding_rows, linear, prepare
from paceline.kernels.rope import query_factors, rotary_table
from paceline.models.families.layers import RoutedExperts
from paceline.models.families.registry import family_of
from paceline.models.families.spec import DecoderSpec
from paceline.models.families.tensors import PieceSpec
from paceline.models.memory import StagedCopies, in_threads
from paceline.models.weights import Weights

Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class ForwardOutput:
    """Result of a pass over T rows, of which R have logits; D is the hidden size."""

    logits: Tensor | None  # [R, V] float32; None if R is 0
    last_hidden: Tensor | None  # [T, D], after the final norm; None unless requested
    hidden_by_layer: Mapping[int, Tensor]  # layer -> [T, D], the hidden state that enters it
    sampled_tokens: Sequence[int] | None = None
    """Tokens after the R rows, if they were asked for in place of logits."""


class DecoderWeights(nn.Module):
    """Everything of a decoder but its forward pass."""

    def __init__(
        self,
        config: DecoderSpec,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype,
        tables: tuple[LinearWeight, LinearWeight] | None = None,
        reduce: Reduce | None = None,
    ) -> None:
        """`tables` has the embedding and the head of another model, for a checkpoint without them. `reduce` sums the ranks'
        parts of a layer's output, if `weights` are the share of one rank."""
        super().__init__()
        self.config, self.device, self.dtype = config, device, dtype
        load = Loader(config, weights, device, dtype)
        if tables is not None:
            self.embedding, self.head = tables
        else:
            self.embedding = load.matrix("model.embed_tokens")
            self.head = self.embedding if config.tie_embeddings else load.matrix("lm_head")
        self.layers = in_threads(lambda i: Layer(config, i, load.layer(i), reduce), range(config.num_layers), device)
        self._set_norms_and_rotary_table(load.norm("model.norm.weight"))

    def _set_norms_and_rotary_table(self, final_norm: Tensor) -> None:
        config = self.config
        self.final_norm = final_norm
        # The norm after each layer: the first norm of the next layer, if it has one, and the final one after the last.
        self.norms_after = [*(layer.input_norm for layer in self.layers[1:]), final_norm]
        tables = [
            rotary_table(r.size, r.theta, r.scaling, config.max_position, r.num_rotated, r.exponent_width)
            for r in config.rotary
        ]
        # cos and sin of each table, [max_position, hd / 2] float32
        self.rotary = [(cos.to(self.device), sin.to(self.device)) for cos, sin in tables]
        self.cos, self.sin = self.rotary[0]
        growth = config.heads.query_scale if config.layers else None
        self.query_scale = None
        """Factors of queries by position, [max_position]; None if they have none."""
        if growth is not None:
            factors = query_factors(growth.beta, growth.period, config.max_position)
            self.query_scale = factors.to(self.device, self.dtype)

    @property
    def is_complete(self) -> bool:
        """Whether all weights are loaded. A pass waits for layers that are still loading."""
        return True

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices as they are stored, without norms and biases."""
        matrices = {id(m): m for m in (self.embedding, self.head)}.values()
        return sum(m.nbytes for m in (*matrices, *(m for layer in self.layers for m in layer.matrices)))

    def embed(self, tokens: Tensor) -> Tensor:
        """[T, D]: the input of layer 0."""
        rows = embedding_rows(self.embedding, tokens)
        if self.has_plain_embedding:
            return rows
        # A number, not a tensor: a CUDA graph cannot record a copy from the host.
        return rows * float(torch.tensor(self.config.embedding_scale, dtype=rows.dtype))

    @property
    def has_plain_embedding(self) -> bool:
        """Whether the input of layer 0 is the unchanged row of the embedding."""
        return self.config.embedding_scale == 1.0

    @property
    def has_plain_logits(self) -> bool:
        """Whether the logits are the unchanged output of the head."""
        return self.config.has_plain_logits

    def logits(self, normed: Tensor) -> Tensor:
        """[R, V] float32 from [R, D] hidden states after the final norm."""
        return self.expand_logits(linear(normed, self.head).float())

    def expand_logits(self, logits: Tensor) -> Tensor:
        """[R, V] from the head's output, which covers a part of V in a draft with a reduced vocabulary. The output may be
        changed in place."""
        scale, cap = self.config.logit_scale, self.config.logit_cap
        if scale != 1.0:
            logits = logits.mul_(scale)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class Layer:
    """Weights of a layer. Those that its architecture does not have are None, or not set if they are matrices."""

    input_norm: Tensor | None = None
    post_attention_norm: Tensor | None = None
    """The norm before the feed-forward layer."""
    attention_norm: Tensor | None = None
    """The norm of the output of attention."""
    feed_forward_norm: Tensor | None = None
    """The norm of the output of the feed-forward layer."""
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    sinks: Tensor | None = None
    router_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    qkv: LinearWeight
    output: LinearWeight
    gate_up: LinearWeight
    down: LinearWeight
    router: LinearWeight
    choice_bias: Tensor | None = None
    layer_scale: Tensor | None = None
    latent_norm: Tensor
    query_norm: Tensor | None = None
    kv_out: LinearWeight
    query_out: LinearWeight
    shared_gate_up: LinearWeight
    shared_down: LinearWeight

    def __init__(
        self,
        config: DecoderSpec,
        number: int,
        weights: Mapping[str, LinearWeight | Tensor],
        reduce: Reduce | None = None,
    ) -> None:
        """`weights` are the weights of this layer by attribute name."""
        self.config, self.spec, self.number = config, config.layers[number], number
        self.reduce = reduce
        vars(self).update(weights)

    @property
    def matrices(self) -> tuple[LinearWeight, ...]:
        return tuple(getattr(self, name) for name in self.config.matrix_names(self.number))

    @cached_property
    def experts(self) -> Experts | None:
        """The routed experts; None for one dense feed-forward layer."""
        ffn = self.spec.ffn
        if not isinstance(ffn, RoutedExperts):
            return None
        routing = Routing(
            ffn.num, ffn.per_token, ffn.normalizes, ffn.scoring, ffn.scale, ffn.num_groups, ffn.kept_groups
        )
        biases = self.router_bias, self.gate_up_bias, self.down_bias, self.choice_bias
        shared = (self.shared_gate_up, self.shared_down) if ffn.shared_width else None
        return Experts(routing, ffn.activation, self.router, self.gate_up, self.down, *biases, shared)

    def sum_over_ranks(self, partial: Tensor) -> Tensor:
        return partial if self.reduce is None else self.reduce(partial)


class Loader:
    """Loads weights to a device and joins the parts of a fused matrix along the output dimension."""

    def __init__(self, config: DecoderSpec, weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
        # Weights of norms that are stored as w - 1 stay float32: rounding them would lose their bits.
        self._has_exact_norms = family_of(config).stored.norms == "w - 1"
        self._config, self._weights, self._device, self._dtype = config, weights, device, dtype
        self._copies = StagedCopies(device)

    def layer(self, number: int) -> dict[str, LinearWeight | Tensor]:
        """All weights of a layer, by attribute name."""
        return {**self.layer_vectors(number), **self.layer_matrices(number)}

    def layer_vectors(self, number: int) -> dict[str, Tensor]:
        """Norms and biases of a layer, by attribute name."""
        return {
            piece.attribute: self._read(piece)(*_names(piece, number))
            for piece in self._config.pieces(number)
            if not piece.is_matrix
        }

    def layer_matrices(self, number: int) -> dict[str, LinearWeight]:
        """Matrices of a layer, by attribute name."""
        matrices = (piece for piece in self._config.pieces(number) if piece.is_matrix)
        return {
            piece.attribute: self.matrix(*(name.removesuffix(".weight") for name in _names(piece, number)))
            for piece in matrices
        }

    def matrix(self, *names: str) -> LinearWeight:
        parts = [self._weights.matrix(f"{name}.weight") for name in names]
        if self._device.type == "cpu" or any(isinstance(part, QuantizedWeight) for part in parts):
            return prepare(concat(parts), self._device, self._dtype)
        packed = self._four_bit(names[0], parts)
        if packed is not None:
            return packed
        if len(parts) == 1 and isinstance(parts[0], Dense) and parts[0].values.device.type == self._device.type:
            return prepare(parts[0], self._device, self._dtype)
        shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
        values = torch.empty(shape, dtype=self._dtype, device=self._device)
        for part, rows in zip(parts, values.split([part.shape[0] for part in parts]), strict=True):
            source = part.values if isinstance(part, Dense) else part.dequantize()
            if self._device.type == "cuda" and source.device.type == "cpu":
                self._copies.copy(rows, source)
            else:
                rows.copy_(source)
        return DenseWeight(values)

    def _four_bit(self, name: str, parts: Sequence[Weight]) -> FourBitWeight | None:
        """The 4-bit codes of a layer's matrix for a GPU; None for another matrix, or one in a format without a kernel."""
        if not name.startswith("model.layers."):
            return None
        packed = [pack(part, self._device) for part in parts if isinstance(part, FourBit)]
        whole = [part for part in packed if part is not None]
        return concat_four_bit(whole) if len(whole) == len(parts) else None

    def _read(self, piece: PieceSpec) -> Callable[..., Tensor]:
        if piece.is_float32:
            return self._float32
        return self.norm if piece.is_norm else self.vector

    def norm(self, name: str) -> Tensor:
        """The weight of a norm."""
        return self._float32(name) if self._has_exact_norms else self.vector(name)

    def _float32(self, name: str) -> Tensor:
        return self._weights.vector(name).to(self._device)

    def vector(self, *names: str) -> Tensor:
        return torch.cat([self._weights.vector(name) for name in names]).to(self._device, self._dtype)


def _names(piece: PieceSpec, number: int) -> list[str]:
    return [f"model.layers.{number}.{tensor.name}" for tensor in piece.tensors]


class HiddenStates(Mapping[int, Tensor]):
    """States [n, D] by layer. They stay in the memory of the pass, where native code reads them, until a layer is asked for."""

    __slots__ = ("layers", "rows", "states")

    def __init__(self, states: Tensor, layers: Sequence[int], rows: Sequence[int]) -> None:
        self.states = states  # [L, T, D], contiguous
        self.layers = layers
        """Layers of `states`, in order."""
        self.rows = rows
        """Chosen rows of T, ascending."""

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def take(self, rows: slice) -> "HiddenStates":
        """A part of the rows."""
        return HiddenStates(self.states, self.layers, self.rows[rows])

    def choose(self, rows: Sequence[int]) -> "HiddenStates":
        """Other rows of the same pass, ascending."""
        return HiddenStates(self.states, self.layers, rows)

    @property
    def is_whole(self) -> bool:
        """Whether these are all rows of the pass, so that no other states stay in memory with them."""
        return len(self.rows) == self.states.shape[1]

    @classmethod
    def join(cls, parts: Sequence["HiddenStates"]) -> "HiddenStates":
        """The rows of several passes, one after the other, in their own memory."""
        states = torch.cat([part._chosen(part.states) for part in parts], 1)
        return cls(states, parts[0].layers, range(states.shape[1]))

    def copy(self) -> "HiddenStates":
        """Returns the states in memory of their own, copied if necessary."""
        own = self._chosen(self.states)
        own = own.clone() if own.untyped_storage().data_ptr() == self.states.untyped_storage().data_ptr() else own
        return HiddenStates(own.contiguous(), self.layers, range(len(self.rows)))

    def __getitem__(self, layer: int) -> Tensor:
        if layer not in self.layers:
            raise KeyError(layer)
        return self._chosen(self.states[self.layers.index(layer)].unsqueeze(0)).squeeze(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def _chosen(self, states: Tensor) -> Tensor:
        rows = self.rows
        if rows and rows[-1] - rows[0] == len(rows) - 1:  # they increase
            return states[:, rows[0] : rows[-1] + 1]
        return states[:, torch.tensor(list(rows), dtype=torch.int64)]

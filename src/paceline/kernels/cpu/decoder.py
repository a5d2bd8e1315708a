"""Native calls of a decoder: all its layers in one call, or a whole pass from token ids to logits or to the picked tokens.

The interpreter costs as much as the products of a small model's decode step. In a whole pass, small tensors and calls between
kernels cost as much as a row.
"""

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from ctypes import c_double, c_float, c_int64, c_uint64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.kernels.cpu import native
from paceline.kernels.formats.activation import NUMBERS, Activation
from paceline.kernels.formats.experts import Experts
from paceline.kernels.formats.layout import AttentionLayout, PassRows
from paceline.kernels.formats.packing import PackedWeight
from paceline.kernels.formats.sampling import log_min_p

MAX_ROTARY_TABLES = 2


class _Layer(ctypes.Structure):
    """`layer_t` in cpu/decoder.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "output", "gate_up", "down", "experts")),
        *((name, c_void_p) for name in ("qkv_bias", "output_bias", "q_norm", "k_norm", "sinks")),
        *((name, c_void_p) for name in ("attention_norm", "feed_forward_norm", "post_attention_norm", "next_norm")),
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("window", "rotary")),
    )


class Decoder(ctypes.Structure):
    """`decoder_t` in cpu/decoder.h."""

    _fields_ = (
        *(
            (name, c_int64)
            for name in (
                "num_layers",
                "hidden_size",
                "ffn_size",
                "heads",
                "kv_heads",
                "width",
                "activation",
                "joins_norms",
            )
        ),
        *((name, c_float) for name in ("eps", "scale", "cap", "residual_scale")),
    )


class Pass(ctypes.Structure):
    """`pass_t` in cpu/decoder.h."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "sequences", "max_blocks")),
        ("cos", c_void_p * MAX_ROTARY_TABLES),
        ("sin", c_void_p * MAX_ROTARY_TABLES),
        *(
            (name, c_void_p)
            for name in (
                *("slots", "starts", "context_lens", "tables", "ancestors", "earlier"),
                *("hidden", "normed", "states"),
            )
        ),
    )


@dataclass(frozen=True, slots=True)
class DecoderShape:
    hidden_size: int
    ffn_size: int
    """Width of the dense feed-forward layers. 0 if all layers have experts."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: Activation
    rms_eps: float
    scale: float
    """Factor of attention scores."""
    score_cap: float | None
    joins_norms: bool
    """Whether the norms of q and k are of all heads together."""
    residual_scale: float


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Weights of a layer, and its cache. A weight that the architecture does not have is None. `next_norm` is the norm after
    the layer."""

    qkv: PackedWeight
    output: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    experts: Experts | None
    """The experts that `gate_up` and `down` belong to."""
    qkv_bias: Tensor | None
    output_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None
    attention_norm: Tensor | None
    feed_forward_norm: Tensor | None
    post_attention_norm: Tensor | None
    next_norm: Tensor | None
    keys: Tensor
    values: Tensor
    window: int | None
    rotary: int
    """Number of the layer's rotary table."""


class DecoderLayers:
    """The layers of one model over one cache."""

    def __init__(self, shape: DecoderShape, layers: Sequence[LayerWeights]) -> None:
        self._layers = tuple(layers)  # keeps the memory behind the addresses
        self._hidden_size = shape.hidden_size
        self.decoder = Decoder(
            len(layers),
            shape.hidden_size,
            shape.ffn_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            NUMBERS[shape.activation],
            shape.joins_norms,
            shape.rms_eps,
            shape.scale,
            shape.score_cap or 0.0,
            shape.residual_scale,
        )
        self.table = (_Layer * len(layers))(*(_addresses(layer) for layer in layers))

    def run(
        self,
        hidden: Tensor,
        normed: Tensor,
        rotary: Sequence[tuple[Tensor, Tensor]],
        layout: AttentionLayout,
        state_layers: Sequence[int],
    ) -> Mapping[int, Tensor]:
        """Compute all layers in place: `hidden` [T, D] becomes the last hidden state and `normed` its norm. Returns the hidden
        states that enter `state_layers`. `rotary` has cos and sin [T, hd/2] of each rotary table."""
        angles = [tensor for pair in rotary for tensor in pair]
        assert all(tensor.is_contiguous() for tensor in (hidden, normed, *angles, layout.slots, layout.block_tables))
        assert layout.starts.dtype is layout.context_lens.dtype is layout.block_tables.dtype is torch.int32
        rows = len(hidden)
        states = {layer: torch.empty(rows, self._hidden_size) for layer in state_layers if layer < len(self._layers)}
        targets = (c_void_p * len(self._layers))()
        for layer, state in states.items():
            targets[layer] = state.data_ptr()
        description = Pass(
            rows,
            len(layout.context_lens),
            layout.block_tables.shape[1],
            (c_void_p * MAX_ROTARY_TABLES)(*(cos.data_ptr() for cos, _ in rotary)),
            (c_void_p * MAX_ROTARY_TABLES)(*(sin.data_ptr() for _, sin in rotary)),
            layout.slots.data_ptr(),
            layout.starts.data_ptr(),
            layout.context_lens.data_ptr(),
            layout.block_tables.data_ptr(),
            _address(layout.ancestors),
            None,
            hidden.data_ptr(),
            normed.data_ptr(),
            ctypes.addressof(targets),
        )
        loaded = native.library()
        assert loaded is not None  # packed weights imply native kernels
        loaded.long.paceline_decoder(ctypes.byref(self.decoder), self.table, ctypes.byref(description))
        return states


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _addresses(layer: LayerWeights) -> _Layer:
    return _Layer(
        layer.qkv.address,
        layer.output.address,
        layer.gate_up.address,
        layer.down.address,
        None if layer.experts is None else layer.experts.address,
        _address(layer.qkv_bias),
        _address(layer.output_bias),
        _address(layer.q_norm),
        _address(layer.k_norm),
        _address(layer.sinks),
        _address(layer.attention_norm),
        _address(layer.feed_forward_norm),
        _address(layer.post_attention_norm),
        _address(layer.next_norm),
        layer.keys.data_ptr(),
        layer.values.data_ptr(),
        layer.window or 0,
        layer.rotary,
    )


class _Model(ctypes.Structure):
    """`model_t` in decoder_pass.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("decoder", "layers", "embedding", "head", "first_norm")),
        ("cos", c_void_p * MAX_ROTARY_TABLES),
        ("sin", c_void_p * MAX_ROTARY_TABLES),
    )


class _Sampler(ctypes.Structure):
    """`sampler_t` in decoder_pass.c."""

    _fields_ = (
        *((name, c_int64) for name in ("is_greedy", "top_k")),
        ("stream", c_uint64),
        *((name, c_double) for name in ("top_p", "temperature", "floor")),
    )


class _Outputs(ctypes.Structure):
    """`outputs_t` in decoder_pass.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("tokens", "positions", "logit_rows")),
        ("num_logits", c_int64),
        *((name, c_void_p) for name in ("logits", "samplers", "picks")),
    )


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """What a pass reads in addition to the layers."""

    embedding: PackedWeight  # [V, D]
    head: PackedWeight  # [V, D]
    first_norm: Tensor | None  # [D]
    rotary: Sequence[tuple[Tensor, Tensor]]
    """cos and sin of each rotary table, [max_position, hd / 2]."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """How the tokens of a sequence are picked."""

    params: SamplingParams
    stream: int
    """Stream of its noise."""


@dataclass(frozen=True, slots=True, eq=False)
class PassOutput:
    logits: Tensor | None  # [R, V]
    sampled_tokens: list[int] | None
    """Tokens after the R rows with logits."""
    normed: Tensor | None  # [T, D], after the final norm
    states: Tensor | None  # [L, T, D]: hidden states that enter the wanted layers, in their order


class DecoderPass:
    """The passes of one model over one cache."""

    def __init__(self, layers: DecoderLayers, weights: ModelWeights) -> None:
        self._layers, self._weights = layers, weights  # they keep the memory behind the addresses
        self._num_layers, self._hidden_size = layers.decoder.num_layers, layers.decoder.hidden_size
        self._limits = weights.embedding.shape[0], min(len(cos) for cos, _ in weights.rotary)
        self._vocab_size = weights.head.shape[0]
        tables = c_void_p * MAX_ROTARY_TABLES
        self._model = _Model(
            ctypes.addressof(layers.decoder),
            ctypes.addressof(layers.table),
            weights.embedding.address,
            weights.head.address,
            _address(weights.first_norm),
            tables(*(cos.data_ptr() for cos, _ in weights.rotary)),
            tables(*(sin.data_ptr() for _, sin in weights.rotary)),
        )

    def run(
        self,
        rows: PassRows,
        state_layers: Sequence[int] = (),
        last_hidden: bool = False,
        samplers: Sequence[Sampler] | None = None,
    ) -> PassOutput:
        """Compute the rows. `state_layers` are layers whose hidden states are returned, in ascending order; the number of all
        layers is the state before the final norm. With `samplers` it returns the picks of each sequence in place of logits."""
        for values, limit in zip((rows.tokens, rows.positions), self._limits, strict=True):
            if min(values) < 0 or max(values) >= limit:  # native code would read beyond a table
                raise IndexError(f"token ids and positions must be in [0, {limit})")
        count, num_logits, width = len(rows.tokens), len(rows.logit_rows), self._hidden_size
        # One array of each type: creating one takes longer than its values
        longs = array("q", rows.tokens)
        for more in (rows.positions, rows.slots, rows.logit_rows, rows.ancestors):
            longs.extend(more)
        ints = array("i", rows.starts)
        ints.extend(rows.context_lens)
        ints.extend(rows.block_tables)
        first_long, first_int = longs.buffer_info()[0], ints.buffer_info()[0]
        sequences = len(rows.context_lens)
        states = torch.empty(len(state_layers), count, width) if state_layers else None
        address = 0 if states is None else states.data_ptr()
        places = {layer: address + i * count * width * 4 for i, layer in enumerate(state_layers)}
        hidden = places.pop(self._num_layers, None)
        targets = (c_void_p * self._num_layers)()
        for layer, place in places.items():
            targets[layer] = place
        normed = torch.empty(count, width) if last_hidden else None
        wants_logits = samplers is None and num_logits > 0
        logits = torch.empty(num_logits, self._vocab_size) if wants_logits else None
        sampled_tokens = None if samplers is None else array("q", bytes(8 * num_logits))
        table = None if samplers is None else (_Sampler * sequences)(*map(self._sampler, samplers))
        description = Pass(
            count,
            sequences,
            rows.max_blocks,
            slots=first_long + 16 * count,
            starts=first_int,
            context_lens=first_int + 4 * (sequences + 1),
            tables=first_int + 4 * (2 * sequences + 1),
            ancestors=first_long + 8 * (3 * count + num_logits) if rows.ancestors else None,
            hidden=hidden,
            normed=None if normed is None else normed.data_ptr(),
            states=ctypes.addressof(targets),
        )
        outputs = _Outputs(
            first_long,
            first_long + 8 * count,
            first_long + 24 * count,
            num_logits,
            None if logits is None else logits.data_ptr(),
            None if table is None else ctypes.addressof(table),
            None if sampled_tokens is None else sampled_tokens.buffer_info()[0],
        )
        loaded = native.library()
        assert loaded is not None  # packed weights imply native kernels
        loaded.long.paceline_decoder_pass(ctypes.byref(self._model), ctypes.byref(description), ctypes.byref(outputs))
        return PassOutput(logits, None if sampled_tokens is None else sampled_tokens.tolist(), normed, states)

    def _sampler(self, sampler: Sampler) -> _Sampler:
        params, width = sampler.params, self._vocab_size
        if params.is_greedy:
            return _Sampler(is_greedy=1)
        top_p = params.top_p if params.top_p < 1.0 else torch.inf
        top_k = min(params.top_k or width, width)
        return _Sampler(0, top_k, sampler.stream, top_p, params.temperature, log_min_p(params))

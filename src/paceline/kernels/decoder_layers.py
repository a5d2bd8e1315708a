"""All layers of a decoder in one native call: the interpreter costs as much as the products of a small model's decode step."""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.activation import NUMBERS, Activation
from paceline.kernels.cpu import native
from paceline.kernels.formats.experts import Experts
from paceline.kernels.layout import AttentionLayout
from paceline.kernels.packing import PackedWeight

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
            for name in ("num_layers", "hidden_size", "ffn_size", "heads", "kv_heads", "width", "activation")
        ),
        *((name, c_float) for name in ("eps", "scale")),
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
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: Activation
    rms_eps: float
    scale: float
    """Factor of attention scores."""


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
    post_attention_norm: Tensor
    next_norm: Tensor
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
            shape.rms_eps,
            shape.scale,
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
        layer.post_attention_norm.data_ptr(),
        layer.next_norm.data_ptr(),
        layer.keys.data_ptr(),
        layer.values.data_ptr(),
        layer.window or 0,
        layer.rotary,
    )

"""All layers of a decoder in one native call: the interpreter costs as much as the products of a small model's decode step."""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.cpu import native
from paceline.kernels.layout import AttentionLayout
from paceline.kernels.packing import PackedWeight


class _Layer(ctypes.Structure):
    """`layer_t` in cpu/decoder.c."""

    _fields_ = tuple(
        (name, c_void_p)
        for name in (
            *("qkv", "output", "gate_up", "down", "qkv_bias", "post_attention_norm", "next_norm"),
            *("keys", "values"),
        )
    )


class _Decoder(ctypes.Structure):
    """`decoder_t` in cpu/decoder.c."""

    _fields_ = (
        *(
            (name, c_int64)
            for name in ("num_layers", "hidden_size", "ffn_size", "heads", "kv_heads", "width", "window")
        ),
        *((name, c_float) for name in ("eps", "scale")),
    )


class _Pass(ctypes.Structure):
    """`pass_t` in cpu/decoder.c."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "sequences", "max_blocks")),
        *(
            (name, c_void_p)
            for name in (
                *("cos", "sin", "slots", "starts", "context_lens", "tables", "ancestors", "hidden", "normed", "states"),
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
    sliding_window: int | None
    rms_eps: float


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Weights of a layer and its cache. `next_norm`: the norm after the layer."""

    qkv: PackedWeight
    output: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    qkv_bias: Tensor | None
    post_attention_norm: Tensor
    next_norm: Tensor
    keys: Tensor
    values: Tensor


class DecoderLayers:
    """The layers of one model over one cache."""

    def __init__(self, shape: DecoderShape, layers: Sequence[LayerWeights]) -> None:
        self._layers = tuple(layers)  # keeps the memory behind the addresses
        self._hidden_size = shape.hidden_size
        self._decoder = _Decoder(
            len(layers),
            shape.hidden_size,
            shape.ffn_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.sliding_window or 0,
            shape.rms_eps,
            shape.head_dim**-0.5,
        )
        self._table = (_Layer * len(layers))(*(_addresses(layer) for layer in layers))

    def run(
        self,
        hidden: Tensor,
        normed: Tensor,
        cos: Tensor,
        sin: Tensor,
        layout: AttentionLayout,
        state_layers: Sequence[int],
    ) -> Mapping[int, Tensor]:
        """Compute all layers in place: `hidden` [T, D] becomes the last hidden state and `normed` its norm. Returns the hidden
        states that enter `state_layers`."""
        assert all(tensor.is_contiguous() for tensor in (hidden, normed, cos, sin, layout.slots, layout.block_tables))
        assert layout.starts.dtype is layout.context_lens.dtype is layout.block_tables.dtype is torch.int32
        rows = len(hidden)
        states = {layer: torch.empty(rows, self._hidden_size) for layer in state_layers if layer < len(self._layers)}
        targets = (c_void_p * len(self._layers))()
        for layer, state in states.items():
            targets[layer] = state.data_ptr()
        ancestors = layout.ancestors
        description = _Pass(
            rows,
            len(layout.context_lens),
            layout.block_tables.shape[1],
            cos.data_ptr(),
            sin.data_ptr(),
            layout.slots.data_ptr(),
            layout.starts.data_ptr(),
            layout.context_lens.data_ptr(),
            layout.block_tables.data_ptr(),
            None if ancestors is None else ancestors.data_ptr(),
            hidden.data_ptr(),
            normed.data_ptr(),
            ctypes.addressof(targets),
        )
        loaded = native.library()
        assert loaded is not None  # packed weights imply native kernels
        loaded.long.paceline_decoder(ctypes.byref(self._decoder), self._table, ctypes.byref(description))
        return states


def _addresses(layer: LayerWeights) -> _Layer:
    bias = layer.qkv_bias
    return _Layer(
        layer.qkv.address,
        layer.output.address,
        layer.gate_up.address,
        layer.down.address,
        None if bias is None else bias.data_ptr(),
        layer.post_attention_norm.data_ptr(),
        layer.next_norm.data_ptr(),
        layer.keys.data_ptr(),
        layer.values.data_ptr(),
    )

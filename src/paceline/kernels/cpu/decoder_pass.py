"""A whole pass of a decoder in one native call, from token ids to logits or to the picked tokens. Small tensors and calls
between kernels cost as much as a row."""

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_uint64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.sampling import SamplingParams
from paceline.kernels.cpu import native
from paceline.kernels.decoder_layers import MAX_ROTARY_TABLES, DecoderLayers, Pass
from paceline.kernels.layout import PassRows
from paceline.kernels.packing import PackedWeight
from paceline.kernels.sampling import log_min_p


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
    first_norm: Tensor  # [D]
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
            weights.first_norm.data_ptr(),
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

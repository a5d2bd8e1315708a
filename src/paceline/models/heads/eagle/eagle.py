"""EAGLE: a decoder layer, or a few, over the target's hidden states and the embedding of the next token.

Slot i joins the hidden state of token i with the embedding of token i + 1 and predicts token i + 2. In EAGLE-3 the state of a
committed token is g = fc([h_l1; h_l2; h_l3]), from inner states of the target; in EAGLE-1 it is the target's last state after
its final norm. The state of a drafted token is the output of the layers in the previous slot. `EagleConfig` has the variants.
Inference only; call it under `torch.inference_mode`.

`EagleRunner` runs the head over one cache. Where `native_head` returns native code, a pass is one native call.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.cpu.eagle_head import EagleHead, HeadWeights, InnerRows
from paceline.kernels.formats.layout import AttentionLayout, uses_gpu_kernels
from paceline.kernels.formats.packing import PackedWeight
from paceline.kernels.linear import embedding_rows, linear
from paceline.kernels.rms_norm import rms_norm
from paceline.models.decoder import HiddenStates, TorchOps, forward_layer, native_layer
from paceline.models.heads.eagle.eagle_weights import EagleWeights
from paceline.models.memory import zeroed
from paceline.models.runner import Span, build_inputs, pass_rows, warm_up_sizes

if TYPE_CHECKING:
    from paceline.kernels.gpu.attention.plan import AttentionPlan


HeadCache = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of each layer of a head."""


def native_head(head: EagleWeights, cache: HeadCache) -> EagleHead | None:
    """The head as one native call. None if a part of the head needs its own call."""
    config = head.config
    if config.version != 3:
        return None
    layers = zip(head.layers, head.norms_after, cache, strict=True)
    found = [native_layer(layer, norm, of_layer) for layer, norm, of_layer in layers]
    native = [layer for layer in found if layer is not None]
    tables = (head.embedding, head.fc, head.vocabulary.head)
    packed = tuple(table for table in tables if isinstance(table, PackedWeight))
    if len(native) < len(found) or len(packed) < len(tables):
        return None
    return EagleHead(
        HeadWeights(
            native[0][0],
            tuple(layer for _, layer in native),
            embedding=packed[0],
            fc=packed[1],
            vocabulary=packed[2],
            input_norm=head.input_norm,
            hidden_norm=head.hidden_norm,
            cos=head.cos,
            sin=head.sin,
            ids=head.vocabulary.ids,
            is_residual_normed=config.norm_before_residual,
            is_output_normed=config.norm_output,
            has_plain_states=config.state_norm == "none" and config.state_size == config.hidden_size,
        )
    )


LANE_BLOCKS = 2
"""Blocks of a lane: the partly filled last block of a sequence, then up to `MAX_BRANCH` slots."""
MAX_BRANCH = (LANE_BLOCKS - 1) * BLOCK_SIZE
"""Most slots that a branch adds to its sequence."""


class EagleModel(EagleWeights):
    _native: tuple[HeadCache, EagleHead | None] | None = None
    """Cache of the last pass, and the head over it."""

    def forward(
        self,
        states: Tensor,  # [T, D]: g, or this layer's output in the previous slot
        tokens: Tensor,  # [T] int64: the token after each state
        positions: Tensor,  # [T] int64, of the states
        layout: AttentionLayout,
        cache: HeadCache,  # keys, values of each layer, [num_blocks, 16, KV, hd]
        plan: "AttentionPlan | None" = None,
    ) -> Tensor:
        """Returns the states [T, D] of the next slots, which `logits` turns into predictions. `plan` comes from the method
        `plan`. If None, the pass makes a new plan."""
        if uses_gpu_kernels(self.device):
            from paceline.models.heads.eagle.eagle_gpu import gpu_eagle_forward

            return gpu_eagle_forward(self, states, tokens, positions, layout, cache, plan)
        ops = TorchOps([(self.cos, self.sin)], positions, layout, self.config.rms_eps)
        hidden, normed = self._enter(ops, states, embedding_rows(self.embedding, tokens))
        for layer, next_norm, of_layer in zip(self.layers, self.norms_after, cache, strict=True):
            hidden, normed = forward_layer(layer, hidden, normed, next_norm, of_layer, ops)
        return normed if self.config.norm_output else hidden

    def _enter(self, ops: TorchOps, states: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """The residual [T, D] of the first layer, and its input: [T, 2 D], or [T, D] in version 1."""
        if self.config.version == 1:
            joined = linear(torch.cat((embedded, states), 1), self.fc, self.fc_bias)
            return joined, joined
        normed = ops.norm(states, self.hidden_norm)
        residual = normed if self.config.norm_before_residual else states
        return residual, torch.cat((ops.norm(embedded, self.input_norm), normed), 1)

    def native(self, cache: HeadCache) -> EagleHead | None:
        """The native calls over `cache`; None if a part of the head needs its own call."""
        known = self._native
        if known is None or known[0] is not cache:
            known = self._native = (cache, native_head(self, cache))
        return known[1]

    def plan(self, rows: int, sequences: int) -> "AttentionPlan | None":
        """Attention plan for passes of this size on a GPU; None on a CPU."""
        if not uses_gpu_kernels(self.device):
            return None
        from paceline.models.heads.eagle.eagle_gpu import plan_eagle

        return plan_eagle(self, rows, sequences)

    def logits(self, states: Tensor) -> Tensor:
        """[R, V'] float32 over the draft's vocabulary from outputs of `forward` [R, D]."""
        if uses_gpu_kernels(self.device):
            from paceline.models.heads.eagle.eagle_gpu import gpu_eagle_norm

            return self.vocabulary.logits(gpu_eagle_norm(self, states))
        if self.has_final_norm:
            states = rms_norm(states, self.final_norm, self.config.rms_eps)
        return self.vocabulary.logits(states)


class EagleRunner:
    """A head and its KV cache: `num_blocks` blocks for committed slots, followed by the lanes.

    A drafted slot attends to its sequence and its own branch, not to other branches. So each growing branch has a lane: a
    private copy of the slots after the last full block. Attention treats each branch as a sequence.
    """

    def __init__(self, model: EagleModel, num_blocks: int, num_lanes: int) -> None:
        self.model = model
        self.num_blocks = num_blocks
        self.num_lanes = num_lanes
        heads = model.config.decoder.heads
        shape = (num_blocks + num_lanes * LANE_BLOCKS, BLOCK_SIZE, heads.num_kv, heads.head_dim)
        # Zeroed: a masked slot must not hold a NaN.
        self.cache = [
            (zeroed(shape, model.dtype, model.device), zeroed(shape, model.dtype, model.device)) for _ in model.layers
        ]

    def lane(self, number: int) -> list[int]:
        """Blocks of a lane."""
        return list(self.lanes(number, 1))

    def lanes(self, first: int, count: int) -> range:
        """Blocks of consecutive lanes."""
        return range(self.num_blocks + first * LANE_BLOCKS, self.num_blocks + (first + count) * LANE_BLOCKS)

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span], states: Tensor | Mapping[int, Tensor]) -> Tensor:
        """[T, D] from states [T, D] or from the target's states by layer, in span order. The tokens of a span are those after
        its states."""
        native = self.model.native(self.cache)
        if native is not None and native.has_plain_states and not isinstance(states, Tensor):
            return native.forward(self.inner_rows([(states, slice(None))]), pass_rows(spans))
        states = states if isinstance(states, Tensor) else self.model.fuse(states)
        if native is not None:
            return native.forward(states, pass_rows(spans))
        inputs = build_inputs(spans, self.model.device)
        return self.model.forward(states, inputs.tokens, inputs.positions, inputs.layout, self.cache)

    def inner_rows(self, parts: Sequence[tuple[Mapping[int, Tensor], slice]]) -> InnerRows:
        """Rows of the target's states, as native calls read them. The caller keeps `parts` until after the call."""
        layers, addresses = self.model.config.state_layers, list[int]()
        for states, chosen in parts:
            if isinstance(states, HiddenStates):
                first, (_, rows, width) = states.states.data_ptr(), states.states.shape
                firsts = [first + 4 * width * rows * states.layers.index(layer) for layer in layers]
                places = [4 * width * row for row in states.rows[chosen]]
            else:
                tensors = [states[layer] for layer in layers]
                pitch = tensors[0].stride(0)
                assert all(tensor.stride() == (pitch, 1) and tensor.dtype is torch.float32 for tensor in tensors)
                firsts = [tensor.data_ptr() for tensor in tensors]
                places = [4 * pitch * row for row in range(len(tensors[0]))[chosen]]
            addresses += [first + place for place in places for first in firsts]
        return InnerRows(addresses, len(layers))

    @torch.inference_mode()
    def warm_up(self, max_num_seqs: int, max_rows: int, longest: int) -> None:
        """Compile the GPU kernels of passes within these limits and of passes over all lanes. `longest` is the most rows of one
        sequence. The passes write to a lane, whose slots are always written before they are read."""
        scratch = self.lane(0)[:1]
        longest = min(longest, len(self.model.cos))
        sizes = {*warm_up_sizes(max_num_seqs, max_rows, longest), *warm_up_sizes(self.num_lanes, self.num_lanes, 1)}
        for count, rows in sorted(sizes):
            padding = Span(scratch * -(-rows // BLOCK_SIZE), 0, [0] * rows, 0)
            states = torch.zeros(
                count * rows, self.model.config.hidden_size, dtype=self.model.dtype, device=self.model.device
            )
            self.model.logits(self.forward([padding] * count, states)[:count])

    @torch.inference_mode()
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks; all are read before any is written."""
        if not sources:
            return
        source, target = (torch.tensor(blocks, device=self.model.device) for blocks in (sources, targets))
        for values in (values for layer in self.cache for values in layer):
            values[target] = values[source]

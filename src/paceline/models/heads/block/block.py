"""DFlash and DSpark: a drafter that proposes a whole block in one pass.

The context of a block are the committed tokens. Their keys and values in every layer are projections of the target's hidden
states, c = norm(fc([h_l1; h_l2; ...])), and are written once: a rejected token leaves nothing behind. The rows of a block are
the newest token and mask tokens. In every layer each row attends to the context and to all rows of the block, in both
directions; the layers are otherwise those of Qwen3. The keys and values of a block are overwritten by the next context.
Inference only; call it under `torch.inference_mode`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.formats.layout import AttentionLayout, uses_gpu_kernels
from paceline.kernels.linear import embedding_rows
from paceline.kernels.rms_norm import rms_norm
from paceline.models.decoder import TorchOps, forward_layer
from paceline.models.heads.block.block_weights import BlockWeights
from paceline.models.memory import zeroed
from paceline.models.runner import Span, build_inputs

BlockCache = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [num_blocks, 16, KV, hd] each."""


class BlockModel(BlockWeights):
    def write_context(self, context: Tensor, positions: Tensor, layout: AttentionLayout, cache: BlockCache) -> None:
        """Store keys and values of committed tokens, from `BlockWeights.context` [T, D]."""
        ops = self._ops(positions, layout)
        for layer, of_layer in zip(self.layers, cache, strict=True):
            ops.project(context, layer, of_layer)

    def forward(self, tokens: Tensor, positions: Tensor, layout: AttentionLayout, cache: BlockCache) -> Tensor:
        """[T, D]: the rows of blocks after the final norm, each of `block_size` rows of one sequence of the layout."""
        eps = self.config.decoder.rms_eps
        ops, attention = self._ops(positions, layout), self._ops(positions, self._whole(layout))
        hidden = embedding_rows(self.embedding, tokens)
        normed: Any = rms_norm(hidden, self.input_norm, eps)
        for layer, next_norm, of_layer in zip(self.layers, self.norms_after, cache, strict=True):
            hidden, normed = forward_layer(layer, hidden, normed, next_norm, of_layer, ops, attention=attention)
        return rms_norm(hidden, self.final_norm, eps)

    def _whole(self, layout: AttentionLayout) -> AttentionLayout:
        """The layout in which every row attends to its context and to its whole block: each row is a sequence of its own, which
        ends with the last row of the block. Its keys and values are stored already."""
        rows = self.config.block_size
        count = len(layout.slots)
        return replace(
            layout,
            starts=torch.arange(count + 1, dtype=torch.int32, device=self.device),
            context_lens=(layout.context_lens + (rows - 1)).repeat_interleave(rows),
            block_tables=layout.block_tables.repeat_interleave(rows, 0),
        )

    def _ops(self, positions: Tensor, layout: AttentionLayout) -> Any:
        """The operations of a pass on the device."""
        rotary, eps = [(self.cos, self.sin)], self.config.decoder.rms_eps
        if not uses_gpu_kernels(self.device):
            return TorchOps(rotary, positions, layout, eps)
        from paceline.models.heads.eagle import HeadOps

        return HeadOps.of(self.config.decoder, rotary, positions, layout, self.device)


class BlockRunner:
    """A block drafter and its KV cache of `num_blocks` blocks."""

    def __init__(self, model: BlockModel, num_blocks: int) -> None:
        self.model, self.num_blocks = model, num_blocks
        heads = model.config.decoder.heads
        shape = (num_blocks, BLOCK_SIZE, heads.num_kv, heads.head_dim)
        # Zeroed: a masked slot must not hold a NaN.
        self.cache = [
            (zeroed(shape, model.dtype, model.device), zeroed(shape, model.dtype, model.device)) for _ in model.layers
        ]

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span], states: Mapping[int, Tensor]) -> Tensor:
        """Store the context of committed tokens from the target's states by layer, in span order, and return it [T, D]. The
        slot of a state is that of its own token; the tokens of a span are not read."""
        config, inputs = self.model.config, build_inputs(spans, self.model.device)
        joined = torch.cat([states[layer][:, : config.state_size] for layer in config.state_layers], 1)
        context = self.model.context(joined)
        self.model.write_context(context, inputs.positions, inputs.layout, self.cache)
        return context

    @torch.inference_mode()
    def draft(self, spans: Sequence[Span]) -> Tensor:
        """[S, block_size, D]: the rows of blocks after the final norm. A span has the rows of a block, after its context."""
        inputs = build_inputs(spans, self.model.device)
        normed = self.model.forward(inputs.tokens, inputs.positions, inputs.layout, self.cache)
        return normed.unflatten(0, (len(spans), -1))

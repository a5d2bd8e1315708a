"""Runs a model over ragged spans of tokens and its paged cache. The target and a draft model are run the same way."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.layout import BLOCK_SIZE, AttentionLayout
from paceline.models.llama import DecoderModel, ForwardOutput


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of one sequence: `tokens` follow `context_len` cached ones and are stored right after them."""

    blocks: Sequence[int]
    context_len: int
    tokens: Sequence[int]
    num_logits: int
    """The last so many rows want logits."""
    positions: Sequence[int] | None = None
    """Rotary positions where they are not `context_len, context_len + 1, …` (a tree)."""
    ancestors: Sequence[int] | None = None
    """Bitmask per row over this span's rows; None: a chain."""


class ModelRunner:
    """A model and the memory its keys and values live in."""

    def __init__(self, model: DecoderModel, num_blocks: int) -> None:
        self.model = model
        self.num_blocks = num_blocks
        self.device = model.device
        shape = (num_blocks, BLOCK_SIZE, model.config.num_kv_heads, model.config.head_dim)
        # Zeroed, so that no masked-out slot can ever hold a NaN.
        self.cache = [
            tuple(torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2))
            for _ in range(model.config.num_layers)
        ]

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span], capture: tuple[int, ...] = ()) -> ForwardOutput:
        """One pass over all rows of `spans`. Logits come in span order, `num_logits` rows each."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts: list[int] = [0]
        logit_rows: list[int] = []
        ancestors: list[int] = []
        is_tree = any(span.ancestors is not None for span in spans)
        for span in spans:
            count, first = len(span.tokens), span.context_len
            tokens.extend(span.tokens)
            positions.extend(range(first, first + count) if span.positions is None else span.positions)
            blocks = span.blocks
            slots.extend(blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(first, first + count))
            starts.append(len(tokens))
            logit_rows.extend(range(len(tokens) - span.num_logits, len(tokens)))
            if is_tree:
                ancestors.extend([-1] * count if span.ancestors is None else span.ancestors)
        widths = [-(-(span.context_len + len(span.tokens)) // BLOCK_SIZE) for span in spans]
        widest = max(widths)
        tables = [list(span.blocks[:width]) + [0] * (widest - width) for span, width in zip(spans, widths, strict=True)]
        layout = AttentionLayout(
            slots=self._tensor(slots),
            starts=self._tensor(starts, torch.int32),
            context_lens=self._tensor([span.context_len for span in spans], torch.int32),
            block_tables=self._tensor(tables, torch.int32),
            ancestors=self._tensor(ancestors) if is_tree else None,
        )
        return self.model(
            self._tensor(tokens), self._tensor(positions), layout, self.cache, self._tensor(logit_rows), capture
        )

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy cached keys and values between slots: how an accepted path of a tree becomes contiguous."""
        if not sources:
            return
        source, target = self._tensor(sources), self._tensor(targets)
        for layer in self.cache:
            for values in layer:
                flat = values.view(-1, *values.shape[2:])
                flat[target] = flat[source]

    def _tensor(self, values: Sequence[int] | Sequence[list[int]], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

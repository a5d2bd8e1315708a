"""A paged cache and the layout of each pass, to call `DecoderModel` as the engine does."""

import random

import torch
from torch import Tensor

from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.formats.layout import AttentionLayout
from paceline.models.decoder.decoder import ForwardOutput
from paceline.models.decoder.forward import DecoderModel


class PagedRunner:
    """Sequences are numbered from 0; their blocks are scattered over the pool."""

    def __init__(self, model: DecoderModel, num_blocks: int = 32) -> None:
        self.model = model
        config = model.config
        shape = (num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        # NaN, so that reading an unwritten slot is detected
        self.cache = [
            (torch.full(shape, torch.nan, dtype=model.dtype), torch.full(shape, torch.nan, dtype=model.dtype))
            for _ in range(config.num_layers)
        ]
        self._free = list(range(num_blocks))
        random.Random(0).shuffle(self._free)
        self._blocks: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def step(
        self, batch: dict[int, list[int]], state_layers: tuple[int, ...] = (), last_hidden: bool = False
    ) -> ForwardOutput:
        """Append tokens to sequences in one pass. Logits of every row."""
        tokens, positions, slots, starts, contexts, tables = [], [], [], [0], [], []
        for sequence, new in batch.items():
            length, blocks = self._lengths.get(sequence, 0), self._blocks.setdefault(sequence, [])
            while len(blocks) * BLOCK_SIZE < length + len(new):
                blocks.append(self._free.pop())
            where = range(length, length + len(new))
            tokens += new
            positions += where
            slots += [blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in where]
            starts.append(len(tokens))
            contexts.append(length)
            tables.append(list(blocks))
            self._lengths[sequence] = length + len(new)
        width = max(map(len, tables))
        layout = AttentionLayout(
            slots=torch.tensor(slots),
            starts=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
        )
        with torch.inference_mode():
            return self.model(
                torch.tensor(tokens),
                torch.tensor(positions),
                layout,
                self.cache,
                torch.arange(len(tokens)),
                state_layers,
                last_hidden,
            )


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, in standard deviations of the reference."""
    return ((ours - theirs).abs().max() / theirs.std()).item()

"""Runs a model over ragged spans of tokens and its paged cache. The target and a draft model are run the same way."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.clock import Clock
from paceline.kernels.layout import BLOCK_SIZE, AttentionLayout
from paceline.kernels.quantized import put, take
from paceline.models.architectures.llama import AfterLayer, DecoderModel
from paceline.models.architectures.output import ForwardOutput


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


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of a pass as a model takes them."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    layout: AttentionLayout
    logit_rows: Tensor  # [R] int64


def lay_out(spans: Sequence[Span], device: torch.device) -> Rows:
    """The rows of all `spans`, one after the other, and where they live."""
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
        slots=_tensor(slots, device),
        starts=_tensor(starts, device, torch.int32),
        context_lens=_tensor([span.context_len for span in spans], device, torch.int32),
        block_tables=_tensor(tables, device, torch.int32),
        ancestors=_tensor(ancestors, device) if is_tree else None,
    )
    return Rows(_tensor(tokens, device), _tensor(positions, device), layout, _tensor(logit_rows, device))


class ModelRunner:
    """A model and the memory its keys and values live in."""

    def __init__(
        self,
        model: DecoderModel,
        num_blocks: int,
        kv_dtype: torch.dtype | None = None,
        cache: Sequence[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        """`kv_dtype` of the cache, the model's own if None; float8_e4m3fn holds twice the tokens of bfloat16. `cache`: another
        runner's memory, for a model that shares it."""
        self.model = model
        self.num_blocks = num_blocks
        self.device = model.device
        self.identity = ""
        """Of the weights, for those who exchange blocks with other processes; empty: nobody does."""
        self.after_layer: AfterLayer | None = None
        """Of passes that somebody watches."""
        shape = (num_blocks, BLOCK_SIZE, model.config.num_kv_heads, model.config.head_dim)
        # Zeroed, so that no masked-out slot can ever hold a NaN.
        self.cache = cache or [
            (
                torch.zeros(shape, dtype=kv_dtype or model.dtype, device=model.device),
                torch.zeros(shape, dtype=kv_dtype or model.dtype, device=model.device),
            )
            for _ in range(model.config.num_layers)
        ]

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span], capture: tuple[int, ...] = (), last_hidden: bool = False) -> ForwardOutput:
        """One pass over all rows of `spans`. Logits come in span order, `num_logits` rows each."""
        rows = lay_out(spans, self.device)
        return self.model(
            rows.tokens,
            rows.positions,
            rows.layout,
            self.cache,
            rows.logit_rows,
            capture,
            last_hidden,
            self.after_layer,
        )

    def seconds(self, spans: Sequence[Span], clock: Clock) -> float:
        """How long a pass takes over `spans`, which want logits."""
        before = clock.now()
        self.forward(spans).logits.max().item()  # type: ignore[union-attr]  # waits for the device
        return clock.now() - before

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy cached keys and values between slots: how an accepted path of a tree becomes contiguous."""
        if not sources:
            return
        source, target = _tensor(sources, self.device), _tensor(targets, self.device)
        for layer in self.cache:
            for values in layer:
                flat = values.view(-1, *values.shape[2:])
                put(flat, target, take(flat, source))

    def sharing(self, model: DecoderModel) -> "ModelRunner":
        """Runs `model`, which has the first layers of this one, over the same memory."""
        return ModelRunner(model, self.num_blocks, cache=self.cache[: model.config.num_layers])

    def close(self) -> None:
        """Give back what is not memory; nothing here."""


def make_runner(model: DecoderModel, num_blocks: int, kv_dtype: torch.dtype | None = None) -> ModelRunner:
    """The one for the model's device."""
    if model.device.type == "cuda":
        from paceline.models.gpu.runner import GpuRunner

        return GpuRunner(model, num_blocks, kv_dtype)
    return ModelRunner(model, num_blocks, kv_dtype)


def _tensor(
    values: Sequence[int] | Sequence[list[int]], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)

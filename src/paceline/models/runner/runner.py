"""Runs a target or a draft model over the scheduled tokens of many sequences and a paged KV cache."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from paceline.core.clock import Clock
from paceline.core.errors import InvalidConfig
from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.cache_slots import CacheSlots
from paceline.kernels.cpu.decoder import PassOutput, Sampler
from paceline.kernels.formats.layout import LONG_ROWS, AfterLayer, AttentionLayout, LongPrompt, PassRows
from paceline.models.decoder import DecoderModel, ForwardOutput, HiddenStates
from paceline.models.memory import zeroed

Cache: TypeAlias = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of every layer, each [num_blocks, BLOCK_SIZE, KV, hd]."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of one sequence: `tokens` follow `context_len` cached tokens and are stored right after them."""

    blocks: Sequence[int]
    context_len: int
    tokens: Sequence[int]
    num_logits: int
    """Number of last rows whose logits are returned."""
    positions: Sequence[int] | None = None
    """Rotary positions of a tree. If None, they are `context_len, context_len + 1, …`."""
    ancestors: Sequence[int] | None = None
    """Bitmask per row over the rows of this span. None if the span is a chain."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchInputs:
    """Inputs of one pass, as a model takes them."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    layout: AttentionLayout
    logit_rows: Tensor  # [R] int64


def pass_rows(spans: Sequence[Span]) -> PassRows:
    """The rows of all `spans`, in order."""
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
    tables: list[int] = []
    for span, width in zip(spans, widths, strict=True):
        tables.extend(span.blocks[:width])
        tables.extend([0] * (widest - width))
    contexts = [span.context_len for span in spans]
    return PassRows(tokens, positions, slots, starts, contexts, tables, widest, ancestors, logit_rows)


def long_prompts(spans: Sequence[Span], first_sequence: int = 0, first_row: int = 0) -> tuple[LongPrompt, ...]:
    """The spans of many rows. The first span is sequence `first_sequence` of its pass and begins at row `first_row`."""
    prompts, row = [], first_row
    for sequence, span in enumerate(spans, first_sequence):
        count = len(span.tokens)
        if count > LONG_ROWS:
            prompts.append(LongPrompt(sequence, row, count, span.context_len))
        row += count
    return tuple(prompts)


def build_inputs(spans: Sequence[Span], device: torch.device) -> BatchInputs:
    """Inputs of a pass over the rows of all `spans`, in order."""
    rows = pass_rows(spans)
    longs = (rows.tokens, rows.positions, rows.slots, rows.ancestors, rows.logit_rows)
    tokens, positions, slots, ancestors, logit_rows = _tensors(longs, torch.int64, device)
    ints = (rows.starts, rows.context_lens, rows.block_tables)
    starts, contexts, tables = _tensors(ints, torch.int32, device)
    layout = AttentionLayout(
        slots=slots,
        starts=starts,
        context_lens=contexts,
        block_tables=tables.view(len(spans), rows.max_blocks),
        ancestors=ancestors if rows.ancestors else None,
        long_prompts=long_prompts(spans),
    )
    return BatchInputs(tokens, positions, layout, logit_rows)


def _tensors(parts: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """A tensor of each part, all in one: creating one takes longer than its values. Each begins at a multiple of 16 bytes, as
    those that a warm-up compiles GPU kernels for."""
    values, starts = list[int](), []
    for part in parts:
        starts.append(len(values))
        values.extend(part)
        values.extend([0] * (-len(values) % (16 // dtype.itemsize)))
    whole = torch.tensor(values, dtype=dtype, device=device)
    return [whole[start : start + len(part)] for start, part in zip(starts, parts, strict=True)]


class ModelRunner:
    """A model and its KV cache."""

    def __init__(
        self,
        model: DecoderModel,
        num_blocks: int,
        kv_dtype: torch.dtype | None = None,
        cache: Cache | None = None,
        weights_id: str = "",
    ) -> None:
        """`kv_dtype` is the number format of the cache, by default the model's. `cache` is the cache of another runner, for a
        model that shares it. `weights_id` identifies the weights when blocks are exchanged with other processes."""
        self.model = model
        self.num_blocks = num_blocks
        self.device = model.device
        self.weights_id = weights_id
        shape = (num_blocks, BLOCK_SIZE, model.config.num_kv_heads, model.config.head_dim)
        # Zeroed: a masked slot must not hold a NaN.
        self.cache: Cache = cache or [
            (
                zeroed(shape, kv_dtype or model.dtype, model.device),
                zeroed(shape, kv_dtype or model.dtype, model.device),
            )
            for _ in range(model.config.num_layers)
        ]
        self._slots = CacheSlots([values for layer in self.cache for values in layer])

    def identify(self, weights_id: str) -> None:
        """Its model has other weights from now on."""
        self.weights_id = weights_id

    def forward(
        self,
        spans: Sequence[Span],
        state_layers: tuple[int, ...] = (),
        last_hidden: bool = False,
        after_layer: AfterLayer | None = None,
        samplers: Sequence[Sampler] | None = None,
    ) -> ForwardOutput:
        """Result of one pass over all rows of `spans`. Logits are in span order, `num_logits` rows per span.

        `samplers`, one for each span: return the picked tokens in place of logits. See `can_pick`.
        """
        whole = self.model.native_pass(self.cache) if after_layer is None else None
        if whole is not None:
            return _output(whole.run(pass_rows(spans), state_layers, last_hidden, samplers), state_layers)
        assert samplers is None
        return self._forward(spans, state_layers, last_hidden, after_layer)

    @torch.inference_mode()
    def _forward(
        self,
        spans: Sequence[Span],
        state_layers: tuple[int, ...],
        last_hidden: bool,
        after_layer: AfterLayer | None,
    ) -> ForwardOutput:
        inputs = build_inputs(spans, self.device)
        return self.model(
            inputs.tokens,
            inputs.positions,
            inputs.layout,
            self.cache,
            inputs.logit_rows,
            state_layers,
            last_hidden,
            after_layer,
        )

    def padded_shape(self, spans: Sequence[Span]) -> tuple[int, int] | None:
        """Sequences and rows of the pass over `spans`, padding included. None if nothing is padded."""
        return None

    @property
    def can_pick(self) -> bool:
        """Whether `forward` takes `samplers`, since the whole pass is one native call."""
        return self.model.native_pass(self.cache) is not None

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V] float32 from [R, D], hidden states after the final norm."""
        return self.model.logits(hidden)

    def measure_seconds(self, spans: Sequence[Span], clock: Clock) -> float:
        """Duration of one pass over `spans`, at least one of which has logits."""
        before = clock.now()
        self.forward(spans).logits.max().item()  # type: ignore[union-attr]  # waits for the device
        return clock.now() - before

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy cached keys and values between slots, so that the accepted path of a tree becomes contiguous."""
        self._slots.copy(sources, targets)

    def share_cache(self, model: DecoderModel) -> "ModelRunner":
        """A runner of `model`, which consists of the first layers of this model, with the same cache."""
        return ModelRunner(model, self.num_blocks, cache=self.cache[: model.config.num_layers])

    def with_cache(self, model: DecoderModel, num_blocks: int, kv_dtype: torch.dtype | None) -> "ModelRunner":
        """A runner of the same kind with a cache of its own, for this model or its first layers."""
        return ModelRunner(model, num_blocks, kv_dtype)

    @property
    def num_head_shares(self) -> int:
        """Number of shares of the key-value heads that the ranks of this model have in their caches."""
        return 1

    def head_shares(self) -> Sequence[Sequence[Cache]]:
        """The caches of all ranks: for every share of the key-value heads, in their order, the cache of each rank with it."""
        return [[self.cache]]

    def settle(self) -> None:
        """Wait until the other ranks have done all that their caches depend on. The engine's thread calls it before other code
        reads or writes those caches."""

    def close(self) -> None:
        """Release resources other than memory; here there are none."""


def _output(passed: PassOutput, layers: tuple[int, ...]) -> ForwardOutput:
    states = passed.states
    inner = {} if states is None else HiddenStates(states, layers, range(states.shape[1]))
    return ForwardOutput(passed.logits, passed.normed, inner, passed.sampled_tokens)


def early_exit(runner: ModelRunner, num_layers: int) -> ModelRunner:
    """A runner of the first `num_layers` layers of the runner's model, followed by its final norm and head.

    It shares weights and cache with `runner` and stores to the same slots. The whole model has to compute those slots again
    before another pass reads them.
    """
    most = runner.model.config.num_layers
    if not 1 <= num_layers <= most:
        raise InvalidConfig(
            f"an early exit after {num_layers} layers is not possible: the model has {most} layers; "
            "lower speculation.exit_layer"
        )
    return runner.share_cache(first_layers(runner.model, num_layers))


def first_layers(whole: DecoderModel, num_layers: int) -> DecoderModel:
    """The first layers of a model, followed by its final norm and head, with the same weights."""
    model = copy.copy(whole)
    model.config = whole.config.first_layers(num_layers)
    model.layers = whole.layers[:num_layers]
    model._native = None
    model.norms_after = [*whole.norms_after[: num_layers - 1], whole.norms_after[-1]]
    return model


def warm_up_sizes(max_num_seqs: int, max_rows: int, longest: int) -> Iterator[tuple[int, int]]:
    """(sequences, rows per sequence) of passes that together compile every kernel that a pass within these limits uses.

    Matrix products compile one kernel per multiple of 16 that rows are padded to, and one for unpadded rows. Attention splits
    contexts by powers of two and changes kernels just above each power; midway, a sequence may still have more rows.
    """
    powers = _powers_of_two(2 * max_num_seqs)
    counts = {size for power in powers for size in (power, power + 1, power + power // 2)} | {*around_16s(powers[-1])}
    for count in sorted({min(count, max_num_seqs) for count in counts}):
        most = min(max_rows // count, longest)
        for rows in sorted({min(rows, most) for rows in (1, 2, *around_16s(2 * most))} - {0}):
            yield count, rows


def around_16s(most: int) -> list[int]:
    """Returns the powers of two from 16, and one less than each: 15, 16, 31, 32, 63, 64, … up to `most`."""
    return [size for power in _powers_of_two(most)[4:] for size in (power - 1, power)]


def _powers_of_two(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length())]

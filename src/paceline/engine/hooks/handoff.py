"""The engine's side of a hand-off: KV blocks of a prompt that one worker computes and another worker decodes.

`HandoffPlan` names the parts of a hand-off: blocks by segment and layer, and hidden states for a draft. The sender and the
receiver derive them alike. `KvExports` exports the blocks of prompts that this engine computes, layer by layer during the
forward pass. `KvImports` imports blocks that another worker computed into this engine's cache.
"""

import itertools
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.sequence import BLOCK_SIZE
from paceline.engine import AfterLayer, Scheduler, Speculator, StepHook
from paceline.engine.step.step import Schedule, Scheduled
from paceline.kv import BlockTables, blocks_for, chain_keys
from paceline.models.blocks import Bytes, copy_blocks, finish_writes, head_shares, layer_bytes, write_layer
from paceline.models.decoder import ForwardOutput
from paceline.models.device import StreamEvent
from paceline.models.runner import ModelRunner
from paceline.speculation import HiddenRows
from paceline.speculation.drafts import Draft

SEGMENT_BYTES = 2 << 20
"""Bytes of a part. Smaller parts cost more in messages than they save in waiting."""
SEGMENT_BLOCKS = 8, 32
"""Least and most blocks of a part of `SEGMENT_BYTES`."""
IN_PLACE_BLOCKS = 512
"""Blocks of a part that is read in place, all layers at once: the copy takes less time than a message."""
NUMBER = struct.Struct("<i")
"""A block number in a part."""
MAX_PARTS = 8192


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Memory layout of keys, values and hidden states. Two workers can exchange blocks if their layouts are equal."""

    num_layers: int
    layer_bytes: int
    """Bytes of one block in one layer."""
    state_bytes: int
    """Bytes of one token's hidden state."""
    kv_dtype: str
    dtype: str
    weights: str = ""
    """Identity of the weights: see `ModelRunner.weights_id`."""

    @staticmethod
    def of(runner: ModelRunner) -> "CacheLayout":
        config, dtype = runner.model.config, runner.model.dtype
        return CacheLayout(
            num_layers=config.num_layers,
            layer_bytes=layer_bytes(runner),
            state_bytes=config.hidden_size * dtype.itemsize,
            kv_dtype=str(runner.cache[0][0].dtype),
            dtype=str(dtype),
            weights=runner.weights_id,
        )

    @property
    def name(self) -> str:
        """A string that is equal only for equal layouts."""
        return f"{self.num_layers}x{self.layer_bytes}/{self.kv_dtype}/{self.state_bytes}/{self.dtype}/{self.weights}"


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Keys and values of one layer, blocks `start` to `stop` of the sequence."""

    layer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StatePart:
    """Hidden states of tokens `start` to `stop`: [layers, stop - start, D]."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class NumberPart:
    """Numbers that blocks `start` to `stop` of the sequence have in the cache of the source, which the destination reads."""

    start: int
    stop: int


Part = BlockPart | StatePart | NumberPart


@dataclass(frozen=True, slots=True)
class HandoffPlan:
    """Blocks `first` to `end` of a sequence, and the states of the last `state_rows` tokens in them after `state_layers`."""

    layout: CacheLayout
    first: int
    end: int
    state_layers: tuple[int, ...] = ()
    state_rows: int = 0
    in_place: bool = False
    """Whether the destination reads the blocks from the source's memory."""

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end:
            raise ValueError(f"invalid block range: {self.first} to {self.end}")
        layers = set(self.state_layers)
        if len(layers) < len(self.state_layers) or not layers <= set(range(self.layout.num_layers + 1)):
            raise ValueError(
                f"invalid state layers {self.state_layers}: use distinct layers up to {self.layout.num_layers}"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens up to the end of the last block."""
        return self.end * BLOCK_SIZE

    @property
    def first_state(self) -> int:
        """First token whose states are sent; `num_tokens` if none are."""
        rows = self.state_rows if self.state_layers else 0
        return max(self.first * BLOCK_SIZE, self.num_tokens - rows)

    def parts(self) -> list[Part]:
        """Parts in the order in which they become ready: by segment, then by layer; the states of a segment last."""
        parts: list[Part] = []
        step = self._segment_blocks
        for start in range(self.first, self.end, step):
            stop = min(start + step, self.end)
            if self.in_place:
                parts.append(NumberPart(start, stop))
            else:
                parts.extend(BlockPart(layer, start, stop) for layer in range(self.layout.num_layers))
            row = max(start * BLOCK_SIZE, self.first_state)
            if row < stop * BLOCK_SIZE:
                parts.append(StatePart(row, stop * BLOCK_SIZE))
        return parts

    def size(self, part: Part) -> int:
        """Bytes of a part."""
        if isinstance(part, NumberPart):
            return (part.stop - part.start) * NUMBER.size
        if isinstance(part, BlockPart):
            return (part.stop - part.start) * self.layout.layer_bytes
        return len(self.state_layers) * (part.stop - part.start) * self.layout.state_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks and states, also of those that are read in place."""
        blocks = (self.end - self.first) * self.layout.num_layers * self.layout.layer_bytes
        return blocks + len(self.state_layers) * (self.num_tokens - self.first_state) * self.layout.state_bytes

    @property
    def _segment_blocks(self) -> int:
        if self.in_place:
            per_segment, blocks = 2, IN_PLACE_BLOCKS
        else:
            least, most = SEGMENT_BLOCKS
            per_segment = self.layout.num_layers + 1
            blocks = min(most, max(least, -(-SEGMENT_BYTES // self.layout.layer_bytes)))
        return max(blocks, -(-(self.end - self.first) * per_segment // MAX_PARTS))


def pack_numbers(blocks: Sequence[int]) -> memoryview:
    """The bytes of a `NumberPart`."""
    return memoryview(b"".join(NUMBER.pack(block) for block in blocks))


def unpack_numbers(data: memoryview, num_blocks: int) -> list[int]:
    """The block numbers in a `NumberPart`. Raises ValueError for numbers that a cache of `num_blocks` blocks does not have."""
    numbers = [number for (number,) in NUMBER.iter_unpack(data)]
    if not all(0 <= number < num_blocks for number in numbers):
        raise ValueError(f"invalid block numbers for a cache of {num_blocks} blocks")
    return numbers


class Sink(Protocol):
    """Receives what is ready. Called on the engine's thread during a forward pass: it must return at once."""

    def blocks(self, layer: int, blocks: tuple[int, ...], ready: StreamEvent) -> None:
        """`layer` of these blocks, the first of the sequence, is final once the device has reached `ready`."""
        ...

    def states(self, start: int, states: Mapping[int, Tensor], ready: StreamEvent) -> None:
        """Hidden states by layer, [n, D], of the tokens from `start` on."""
        ...


@dataclass(slots=True, eq=False)
class _Export:
    plan: HandoffPlan
    sink: Sink
    held: list[int] = field(default_factory=list)
    """First blocks of the sequence, full; held until `end`, because passes and the sink read them."""
    num_reported: int = 0
    """Blocks reported to the sink in all layers."""
    num_reported_states: int = 0
    """Tokens whose states were reported. After a preemption some of them are computed again."""


class KvExports(StepHook):
    """Reports blocks and hidden states of exported requests. Called by the engine's thread only; see `EngineLoop.call`."""

    def __init__(self, runner: ModelRunner, tables: BlockTables) -> None:
        self._runner = runner
        self._tables = tables
        self._exports: dict[str, _Export] = {}
        self._current: list[tuple[_Export, Scheduled]] = []
        """Exports in the current pass."""

    def begin(self, request_id: str, plan: HandoffPlan, sink: Sink) -> None:
        """Export a request. Call it before the request is added to the engine."""
        self._runner.settle()
        self._exports[request_id] = _Export(plan, sink)

    def export_cached(self, request_id: str, plan: HandoffPlan, sink: Sink, ids: Sequence[int], salt: str) -> bool:
        """Report the cached blocks of `ids` to `sink` without computing anything. False if some are not cached."""
        blocks = self._tables.pool.find(chain_keys(ids, salt))
        if len(blocks) < plan.end:
            return False
        held = blocks[: plan.end]
        self._tables.pool.hold(held)
        self._exports[request_id] = _Export(plan, sink, held)
        self._runner.settle()
        ready = self._record_event()
        for layer in range(plan.layout.num_layers):
            sink.blocks(layer, tuple(held), ready)
        return True

    def end(self, request_id: str) -> None:
        """Release the blocks of a request. Nothing may read them any more."""
        export = self._exports.pop(request_id, None)
        if export is not None:
            self._tables.pool.release(export.held)

    @property
    def needs_host_prefill(self) -> bool:
        return bool(self._exports)

    def hidden_layers(self, schedule: Schedule) -> Collection[int]:
        if not self._exports:
            return ()
        exports = (self._exports.get(item.sequence.request_id) for item in schedule.items)
        return {layer for export in exports if export is not None for layer in export.plan.state_layers}

    def before_pass(self, schedule: Schedule) -> AfterLayer | None:
        """Hold the blocks that the pass will fill, and report each layer of them as soon as it is computed."""
        if not self._exports:
            return None
        self._current = [
            (export, item)
            for item in schedule.items
            if (export := self._exports.get(item.sequence.request_id)) is not None
        ]
        for export, item in self._current:
            full = (item.sequence.num_computed + item.num_tokens) // BLOCK_SIZE
            fresh = self._tables.blocks(item.sequence.id)[len(export.held) : min(full, export.plan.end)]
            self._tables.pool.hold(fresh)
            export.held.extend(fresh)
        return self._after_layer if self._current else None

    def after_pass(self, schedule: Schedule, drafts: Mapping[int, Draft], output: ForwardOutput) -> None:
        """Report the hidden states of the pass."""
        if not self._current:
            return
        first_rows, row = {}, 0
        for item in schedule.items:
            first_rows[item.sequence.id] = row
            row += item.num_tokens + len(drafts.get(item.sequence.id, ()))
        for export, item in self._current:
            export.num_reported = len(export.held)
            self._report_states(export, item, first_rows[item.sequence.id], output)
        self._current = []

    def _after_layer(self, layer: int) -> None:
        ready = self._record_event()
        for export, _ in self._current:
            if len(export.held) > export.num_reported:
                export.sink.blocks(layer, tuple(export.held), ready)

    @torch.inference_mode()
    def _report_states(self, export: _Export, item: Scheduled, row: int, output: ForwardOutput) -> None:
        if not export.plan.state_layers:
            return
        start = item.sequence.num_computed
        first = max(start, export.plan.first_state, export.num_reported_states)
        last = min(start + item.num_tokens, export.plan.num_tokens)
        if first < last:
            part = slice(row + first - start, row + last - start)
            # A copy: the next pass may reuse the memory of its outputs
            states = {layer: output.hidden_by_layer[layer][part].clone() for layer in export.plan.state_layers}
            export.sink.states(first, states, self._record_event())
            export.num_reported_states = last

    def _record_event(self) -> StreamEvent:
        event = StreamEvent(self._runner.device)
        event.record()
        return event


@dataclass(slots=True, eq=False)
class PromptImport:
    """Blocks reserved for one prompt. One thread may `write` while the engine computes: no sequence uses them yet."""

    request_id: str
    ids: Sequence[int]
    plan: HandoffPlan
    blocks: tuple[int, ...]
    """Blocks of the whole prefix, including those that were cached here."""
    table: int
    runner: ModelRunner
    fence: StreamEvent
    """Event after all work of the device that may still write to these blocks for their former owner."""
    num_cached: int
    """Tokens that were cached here before."""
    states: list[HiddenRows] = field(default_factory=list)
    """Hidden states on the host. The engine copies them to the device on the stream that reads them."""
    _stream: "torch.cuda.Stream | None" = None

    def write(self, part: Part, data: Bytes) -> None:
        """Write one part; return when it is in the cache. Hidden states keep a reference to `data`, which must not change."""
        with self._on_stream():
            self._write(part, data)
        self.finish()

    def copy(self, part: NumberPart, data: memoryview, sources: Sequence[Tensor]) -> None:
        """Start to copy blocks from the planes of another worker's cache, mapped in this process. `data` holds the numbers of
        the blocks in that cache. Raises ValueError for numbers that the cache does not have."""
        numbers = unpack_numbers(data, len(sources[0]))
        with self._on_stream():
            shares = head_shares(self.runner)
            copy_blocks(sources, numbers, shares, self.blocks[part.start : part.stop])
            finish_writes(shares)

    def finish(self) -> None:
        """Wait for the copies."""
        if self._stream is not None:
            self._stream.synchronize()

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Submit work to the stream of this import, after all that may still write to its blocks."""
        if self.runner.device.type != "cuda":
            yield
            return
        if self._stream is None:
            self.fence.wait()
            self._stream = torch.cuda.Stream(self.runner.device)
        with torch.cuda.device(self.runner.device), torch.cuda.stream(self._stream):
            yield

    def _write(self, part: Part, data: Bytes) -> None:
        if isinstance(part, BlockPart):
            write_layer(self.runner, part.layer, self.blocks[part.start : part.stop], data)
            return
        assert isinstance(part, StatePart)
        dtype, layers = self.runner.model.dtype, self.plan.state_layers
        values = torch.frombuffer(data, dtype=dtype).view(len(layers), part.stop - part.start, -1)
        self.states.append(HiddenRows(part.start, dict(zip(layers, values, strict=True)), None))


class KvImports(StepHook):
    """Reserves blocks for prompts of other workers and publishes complete ones. Called by the engine's thread only.

    A published prompt is an ordinary prefix hit: the sequence computes the rest of its prompt, at least the last token.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, speculator: Speculator, max_model_len: int) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._tables = scheduler.tables
        self._speculator = speculator
        # One sequence of full length must fit in addition to all reservations, so that the engine can always make progress
        self._max_reserved = self._tables.pool.num_blocks - blocks_for(max_model_len) - 1
        self._numbers = itertools.count(1)
        self._reserved = 0
        self._unscheduled: dict[str, PromptImport] = {}
        """Published imports by request, held until the sequence is scheduled."""

    @cached_property
    def layout(self) -> CacheLayout:
        return CacheLayout.of(self._runner)

    def cached(self, ids: Sequence[int], salt: str) -> int:
        """Tokens of the prompt that need not be computed, including those in lower tiers."""
        count, tiers = len(self._tables.find(ids, salt)[0]), self._scheduler.tiers
        return (count if tiers is None else count + tiers.num_below(ids, salt, count)) * BLOCK_SIZE

    def reserve(
        self, request_id: str, ids: Sequence[int], salt: str, state_layers: tuple[int, ...] = (), state_rows: int = 0
    ) -> PromptImport | None:
        """Reserve blocks for all full blocks of `ids` that are not cached. None if too few are free, or none is missing."""
        pool, end = self._tables.pool, (len(ids) - 1) // BLOCK_SIZE
        cached, _ = self._tables.find(ids, salt)
        missing = end - len(cached)
        needed = missing + pool.num_unheld(cached)
        spare = pool.num_free - 1 - len(self._scheduler.running)
        if (
            not self._tables.prefix_caching
            or missing <= 0
            or needed > spare
            or self._reserved + end > self._max_reserved
        ):
            return None
        table = -next(self._numbers)  # negative: the ids of sequences start at 0
        num_cached = self._tables.open(table, ids, salt)
        grown = self._tables.grow(table, end * BLOCK_SIZE)
        assert grown
        self._reserved += end
        self._runner.settle()
        fence = StreamEvent(self._runner.device)
        fence.record()
        plan = HandoffPlan(self.layout, len(cached), end, state_layers, state_rows)
        blocks = tuple(self._tables.blocks(table))
        return PromptImport(request_id, ids, plan, blocks, table, self._runner, fence, num_cached)

    def publish(self, incoming: PromptImport, num_blocks: int) -> None:
        """Make the first `num_blocks` blocks a prefix hit; they must be complete. They are held until `scheduled` or
        `request_cancelled`."""
        self._tables.publish(incoming.table, incoming.ids, num_blocks * BLOCK_SIZE)
        self._tables.shrink(incoming.table, num_blocks * BLOCK_SIZE)
        self._unscheduled[incoming.request_id] = incoming

    def request_cancelled(self, request_id: str) -> None:
        """Release the blocks of a request that will not be scheduled. They stay cached until evicted."""
        incoming = self._unscheduled.pop(request_id, None)
        if incoming is not None:
            self.release(incoming)

    def release(self, incoming: PromptImport) -> None:
        """Release the reservation. No `write` may follow."""
        self._tables.close(incoming.table)
        self._reserved -= incoming.plan.end

    def scheduled(self, schedule: Schedule) -> None:
        """Release imports whose sequence is scheduled, and so holds the blocks itself, and pass on their hidden states."""
        if not self._unscheduled:
            return
        for item in schedule.items:
            incoming = self._unscheduled.pop(item.sequence.request_id, None)
            if incoming is not None:
                self.release(incoming)
                known = [hidden for hidden in incoming.states if hidden.end <= item.sequence.num_computed]
                self._speculator.add_hidden_states(item.sequence, [self._on_device(hidden) for hidden in known])

    def _on_device(self, hidden: HiddenRows) -> HiddenRows:
        inner = {layer: states.to(self._runner.device) for layer, states in hidden.by_layer.items()}
        return HiddenRows(hidden.start, inner, None)

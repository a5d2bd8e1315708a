"""Import of KV blocks that another worker computed into this engine's cache."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from paceline.engine.hooks.handoff_plan import (
    BlockPart,
    CacheLayout,
    HandoffPlan,
    NumberPart,
    Part,
    StatePart,
    unpack_numbers,
)
from paceline.engine.hooks.hook import StepHook
from paceline.engine.schedule import Schedule
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculator import Speculator
from paceline.kernels.layout import BLOCK_SIZE
from paceline.kv.block_tables import blocks_for
from paceline.models.cuda_graph import StreamEvent
from paceline.models.kv_blocks import Bytes, copy_blocks, finish_writes, head_shares, write_layer
from paceline.models.runner import ModelRunner
from paceline.speculation.proposer import HiddenRows


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

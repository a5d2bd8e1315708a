"""Prompts that were computed elsewhere, on their way into this engine's cache."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from paceline.engine.hooks.handoff_plan import BlockPart, CacheLayout, HandoffPlan, Part
from paceline.engine.hooks.hook import StepHook
from paceline.engine.schedule import Schedule
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculator import Speculator
from paceline.kernels.layout import BLOCK_SIZE
from paceline.kv.block_tables import blocks_for
from paceline.models.cuda_graph import StreamEvent
from paceline.models.kv_blocks import Bytes, write_layer
from paceline.models.runner import ModelRunner
from paceline.speculation.proposer import Hidden


@dataclass(slots=True, eq=False)
class Arrival:
    """Blocks that are reserved for a prompt and not yet anybody's. `write` may be called on any one thread, while the engine
    computes: nobody else looks at these blocks."""

    request_id: str
    ids: Sequence[int]
    plan: HandoffPlan
    blocks: tuple[int, ...]
    """Of the whole prefix, those that were here before included."""
    table: int
    runner: ModelRunner
    fence: StreamEvent
    """What the device may still write to these blocks, for whoever had them before, lies before it."""
    num_cached: int
    """Tokens that were here before."""
    states: list[Hidden] = field(default_factory=list)
    """On the host: they go to the device on the stream of those who will read them."""
    _stream: "torch.cuda.Stream | None" = None

    def write(self, part: Part, data: Bytes) -> None:
        """Returns when the bytes are where they belong; those of hidden states are kept, and must stay as they are."""
        if self.runner.device.type != "cuda":
            self._put(part, data)
            return
        if self._stream is None:
            self.fence.wait()
            self._stream = torch.cuda.Stream(self.runner.device)
        with torch.cuda.device(self.runner.device), torch.cuda.stream(self._stream):
            self._put(part, data)
            self._stream.synchronize()

    def _put(self, part: Part, data: Bytes) -> None:
        if isinstance(part, BlockPart):
            write_layer(self.runner, part.layer, self.blocks[part.start : part.stop], data)
            return
        dtype, layers = self.runner.model.dtype, self.plan.state_layers
        values = torch.frombuffer(data, dtype=dtype).view(len(layers), part.stop - part.start, -1)
        self.states.append(Hidden(part.start, dict(zip(layers, values, strict=True)), None))


class Imports(StepHook):
    """Reserves blocks for what is to arrive, and publishes them once it has. The engine's thread alone calls it.

    What has arrived is a prefix hit like any other: the sequence is scheduled as if its prompt had been asked for before, and
    computes what is left of it, its last token at least.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, speculator: Speculator, max_model_len: int) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._tables = scheduler.tables
        self._speculator = speculator
        # One sequence of full length must always fit beside what is reserved: somebody can go on
        self._most = self._tables.pool.num_blocks - blocks_for(max_model_len) - 1
        self._numbers = itertools.count(1)
        self._reserved = 0
        self._landed: dict[str, Arrival] = {}
        """By request: complete, and held until its sequence has a seat."""

    @cached_property
    def layout(self) -> CacheLayout:
        return CacheLayout.of(self._runner)

    def cached(self, ids: Sequence[int], salt: str) -> int:
        """Tokens of the prompt that need not be computed, those in lower tiers included."""
        count, tiers = len(self._tables.find(ids, salt)[0]), self._scheduler.tiers
        return (count if tiers is None else count + tiers.below(ids, salt, count)) * BLOCK_SIZE

    def reserve(
        self, request_id: str, ids: Sequence[int], salt: str, state_layers: tuple[int, ...] = (), state_rows: int = 0
    ) -> Arrival | None:
        """Room for all full blocks of `ids` that are not here; None where there is none to spare, or nothing is missing."""
        pool, end = self._tables.pool, (len(ids) - 1) // BLOCK_SIZE
        cached, _ = self._tables.find(ids, salt)
        missing = end - len(cached)
        needed = missing + pool.num_unheld(cached)
        spare = pool.num_free - 1 - len(self._scheduler.running)
        if not self._tables.prefix_caching or missing <= 0 or needed > spare or self._reserved + end > self._most:
            return None
        table = -next(self._numbers)  # sequences count upwards from 0
        num_cached = self._tables.open(table, ids, salt)
        grown = self._tables.grow(table, end * BLOCK_SIZE)
        assert grown
        self._reserved += end
        fence = StreamEvent(self._runner.device)
        fence.record()
        plan = HandoffPlan(self.layout, len(cached), end, state_layers, state_rows)
        blocks = tuple(self._tables.blocks(table))
        return Arrival(request_id, ids, plan, blocks, table, self._runner, fence, num_cached)

    def land(self, arrival: Arrival, num_blocks: int) -> None:
        """The first `num_blocks` blocks are complete, and can be hit from now on. They stay until `scheduled` or `request_cancelled`."""
        self._tables.publish(arrival.table, arrival.ids, num_blocks * BLOCK_SIZE)
        self._tables.shrink(arrival.table, num_blocks * BLOCK_SIZE)
        self._landed[arrival.request_id] = arrival

    def request_cancelled(self, request_id: str) -> None:
        """The request will not be scheduled. What has landed stays cached as long as there is room."""
        arrival = self._landed.pop(request_id, None)
        if arrival is not None:
            self.release(arrival)

    def release(self, arrival: Arrival) -> None:
        """Nobody writes to it any more."""
        self._tables.close(arrival.table)
        self._reserved -= arrival.plan.end

    def scheduled(self, schedule: Schedule) -> None:
        """Sequences in it that were waiting for an arrival hold its blocks now, and learn the hidden states that came along."""
        if not self._landed:
            return
        for item in schedule.items:
            arrival = self._landed.pop(item.sequence.request_id, None)
            if arrival is not None:
                self.release(arrival)
                known = [hidden for hidden in arrival.states if hidden.end <= item.sequence.num_computed]
                self._speculator.hand_over(item.sequence, [self._on_device(hidden) for hidden in known])

    def _on_device(self, hidden: Hidden) -> Hidden:
        inner = {layer: states.to(self._runner.device) for layer, states in hidden.inner.items()}
        return Hidden(hidden.start, inner, None)

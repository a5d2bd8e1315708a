"""Export of KV blocks of prompts that this engine computes for another worker, layer by layer during the forward pass."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from paceline.engine.hooks.handoff_plan import HandoffPlan
from paceline.engine.hooks.hook import AfterLayer, StepHook
from paceline.engine.schedule import Schedule, Scheduled
from paceline.kernels.layout import BLOCK_SIZE
from paceline.kv.block_tables import BlockTables
from paceline.kv.prefix import chain_keys
from paceline.models.architectures.decoder import ForwardOutput
from paceline.models.cuda_graph import StreamEvent
from paceline.models.runner import ModelRunner
from paceline.speculation.drafts import Draft


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

"""One prompt that a prefill worker gives away: from blocks of its cache to parts of a transfer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.engine.hooks.handoff_plan import BlockPart, HandoffPlan, StatePart
from paceline.models.cuda_graph import StreamEvent, staging_bytes
from paceline.models.kv_blocks import read_layer
from paceline.models.runner import ModelRunner
from paceline.runtime.transfer.messages import TransferHandle
from paceline.runtime.transfer.transfer import Transfer
from paceline.runtime.wire.transport import Peer


@dataclass(slots=True, eq=False)
class _Rows:
    """Hidden states of one part, as far as they have been computed."""

    values: Tensor  # [layers, n, D] on the host
    missing: int


class ExportJob:
    """Hears from the engine's thread what is ready (`engine.exports.Sink`) and hands the copying to another: `later` carries
    out, in order, on a thread that may wait for the device."""

    def __init__(
        self, peer: Peer, attempt: int, request_id: str, plan: HandoffPlan, runner: ModelRunner, later: "Later"
    ) -> None:
        self.peer = peer
        self.attempt = attempt
        self.request_id = request_id
        self.plan = plan
        self.parts = plan.parts()
        self.transfer = Transfer([plan.size(part) for part in self.parts])
        self.handle: TransferHandle | None = None
        self.is_over = False
        """Nobody wants it any more: nothing further is read."""
        self.num_missing = len(self.parts)
        """Parts that are not filled yet."""
        self._runner = runner
        self._later = later
        self._filled = [0] * plan.layout.num_layers
        """By layer: its parts that are."""
        self._of_layer = [
            [i for i, part in enumerate(self.parts) if isinstance(part, BlockPart) and part.layer == layer]
            for layer in range(plan.layout.num_layers)
        ]
        self._states = {i: part for i, part in enumerate(self.parts) if isinstance(part, StatePart)}
        self._rows: dict[int, _Rows] = {}

    @property
    def num_bytes(self) -> int:
        return sum(self.transfer.sizes)

    def blocks(self, layer: int, blocks: tuple[int, ...], ready: StreamEvent) -> None:
        self._later(self, lambda: self._fill_layer(layer, blocks, ready))

    def states(self, start: int, states: Mapping[int, Tensor], ready: StreamEvent) -> None:
        self._later(self, lambda: self._fill_states(start, states, ready))

    def _fill_layer(self, layer: int, blocks: tuple[int, ...], ready: StreamEvent) -> None:
        ready.wait()
        mine = self._of_layer[layer]
        while self._filled[layer] < len(mine):
            index = mine[self._filled[layer]]
            part = self.parts[index]
            if part.stop > len(blocks):
                return
            out = staging_bytes(self.transfer.sizes[index], self._runner.device)
            read_layer(self._runner, layer, blocks[part.start : part.stop], out)
            self._fill(index, out)
            self._filled[layer] += 1

    @torch.inference_mode()
    def _fill_states(self, start: int, states: Mapping[int, Tensor], ready: StreamEvent) -> None:
        ready.wait()
        stacked = torch.stack([states[layer] for layer in self.plan.state_layers]).cpu()  # [layers, n, D]
        end = start + stacked.shape[1]
        for index, part in list(self._states.items()):
            first, last = max(start, part.start), min(end, part.stop)
            if first >= last:
                continue
            if index not in self._rows:
                shape = (stacked.shape[0], part.stop - part.start, stacked.shape[2])
                self._rows[index] = _Rows(torch.empty(shape, dtype=stacked.dtype), part.stop - part.start)
            rows = self._rows[index]
            rows.values[:, first - part.start : last - part.start] = stacked[:, first - start : last - start]
            rows.missing -= last - first
            if not rows.missing:
                del self._rows[index], self._states[index]
                self._fill(index, rows.values.view(torch.uint8).numpy().data)

    def _fill(self, index: int, data: memoryview) -> None:
        self.num_missing -= 1  # first: whoever has the last part may say so at once
        self.transfer.fill(index, data)


Later = Callable[[ExportJob, Callable[[], None]], None]

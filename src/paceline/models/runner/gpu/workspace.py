"""Memory that the passes of a runner share. Passes run one after another, and a graph that owned its memory would keep it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.kernels.formats.layout import AfterLayer, AttentionLayout, PassSize
from paceline.kernels.gpu.attention.plan import AttentionPlan, AttentionScratch, power_of_two
from paceline.models.decoder import DecoderModel, ForwardOutput, gpu_forward, plan_pass
from paceline.models.device import MAX_GRAPH_ROWS, GraphPool


class PassLeader(Protocol):
    """Lets the other ranks of a divided model follow the passes of this one."""

    def begin_pass(self, size: PassSize, tokens: Tensor, positions: Tensor, layout: AttentionLayout) -> None:
        """Let the other ranks begin this pass."""
        ...


class Workspace:
    """Buffers for all passes of a model and of its early exits. A buffer that is too small is replaced by a new one, so
    request the largest size first."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self._logits: Tensor | None = None
        self._states: Tensor | None = None
        self._attention_output: Tensor | None = None
        self.attention_scratch = AttentionScratch(model.device)
        self.graph_pool = GraphPool(model.device)

    def logits(self, rows: int) -> Tensor:
        """[rows, V] float32"""
        if self._logits is None or len(self._logits) < rows:
            shape = power_of_two(max(rows, MAX_GRAPH_ROWS)), self._model.head.shape[0]
            self._logits = torch.empty(shape, dtype=torch.float32, device=self._model.device)
        return self._logits[:rows]

    def states(self, count: int, rows: int) -> Tensor:
        """[count, rows, D]"""
        width, states = self._model.config.hidden_size, self._states
        if states is None or len(states) < count * rows:
            states = torch.empty(count * rows, width, dtype=self._model.dtype, device=self._model.device)
            self._states = states
        return states[: count * rows].view(count, rows, width)

    def attention_output(self, rows: int) -> Tensor:
        """[rows, H * hd]. Zeros at first, so that rows which attention never writes are finite."""
        config = self._model.config
        if self._attention_output is None or len(self._attention_output) < rows:
            shape = rows, config.num_heads * config.head_dim
            self._attention_output = torch.zeros(shape, dtype=self._model.dtype, device=self._model.device)
        return self._attention_output[:rows]


@dataclass(frozen=True, slots=True, eq=False)
class PassContext:
    """Model, cache and buffers of the passes of one runner."""

    model: DecoderModel
    cache: Sequence[tuple[Tensor, Tensor]]
    workspace: Workspace
    table_width: int
    """Blocks per sequence in a block table."""
    scratch_block: int
    """Block that padding rows write to; no pass reads it."""
    leader: PassLeader | None = None
    """Lets other ranks compute their shares of every pass."""

    @property
    def device(self) -> torch.device:
        return self.model.device

    def plan(self, size: PassSize) -> AttentionPlan:
        """Calls `plan_pass` with the scratch memory that all passes share."""
        return plan_pass(self.model, size, self.workspace.attention_scratch)

    def forward(
        self,
        size: PassSize,
        plan: AttentionPlan,
        tokens: Tensor,
        positions: Tensor,
        layout: AttentionLayout,
        logit_rows: Tensor | None,
        state_layers: tuple[int, ...] = (),
        last_hidden: bool = False,
        after_layer: AfterLayer | None = None,
        logits_out: Tensor | None = None,
        attention_out: Tensor | None = None,
    ) -> ForwardOutput:
        """Runs `gpu_forward`. `plan` is the plan of this size."""
        if self.leader is not None:
            self.leader.begin_pass(size, tokens, positions, layout)
        return gpu_forward(
            self.model,
            tokens,
            positions,
            layout,
            self.cache,
            logit_rows,
            state_layers,
            last_hidden,
            plan,
            after_layer,
            logits_out,
            attention_out,
        )

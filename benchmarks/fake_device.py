"""A fake GPU that computes nothing and takes no time, to measure the host. Inputs for the device are still written."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from tests.fakes import TINY

from paceline.engine.executors.graph import mixed as mixed_steps
from paceline.engine.executors.graph.batch import GraphBatch
from paceline.engine.executors.graph.inflight import InflightStep, SlotResults
from paceline.kernels.cpu import native
from paceline.kernels.gpu.speculation.accept import Accepted
from paceline.models.architectures.decoder import ForwardOutput
from paceline.models.architectures.llama import DecoderModel
from paceline.models.gpu import forward_pass as gpu_pass
from paceline.models.gpu import mixed as gpu_mixed
from paceline.models.gpu import ragged as gpu_ragged

SHAPE = replace(TINY, num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1, vocab_size=1024, max_position=2048)
ROWS, WORDS = 2048, range(300, 700)
PASS, ROW = 4e-3, 1e-6
"""Reported seconds of a pass and of each row."""


class FakeDevice:
    """Computes nothing: every other sequence accepts all drafts, and tokens are words."""

    def __init__(self, draft_seconds: float) -> None:
        self._draft_seconds, self._wait = draft_seconds, InflightStep.wait
        self._logits = torch.eye(SHAPE.vocab_size)[torch.arange(ROWS) % len(WORDS) + WORDS[0]]

    def graph(self, batch: GraphBatch, part: str, shape: Any, keeps: bool = False) -> "FakeDevice":
        if part == "accept":
            round_ = batch._round(shape)
            round_.report[0] = batch._limits
            round_.report[0, 1::2] = 0
            round_.path.tokens[:] = WORDS[0]
        return self

    def replay(self) -> None: ...

    def wait(self, step: InflightStep) -> SlotResults:
        drafted, rows = self._draft_seconds * step.shape.levels, len(step.limits) * (1 + step.shape.nodes)
        return replace(self._wait(step), draft_seconds=drafted, forward_seconds=PASS + ROW * rows)

    def draft_seconds(self, step: mixed_steps.InflightMixed) -> float:
        return self._draft_seconds * step.shape.levels

    def forward(self, model: Any, tokens: torch.Tensor, *args: Any, **options: Any) -> ForwardOutput:
        """Signature of `gpu_forward` and `DecoderModel.forward`."""
        states = torch.zeros(len(tokens), SHAPE.hidden_size) if options.get("last_hidden") else None
        return ForwardOutput(None if args[3] is None else self.head(model, args[3]), states, {})

    def head(self, model: Any, wanted: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(wanted)]

    def sample(self, logits: torch.Tensor, *args: Any) -> torch.Tensor:
        return torch.full((len(logits),), WORDS[0])

    def accept(
        self, drafts: torch.Tensor, picks: torch.Tensor, limits: torch.Tensor, *args: Any, slots: torch.Tensor
    ) -> Accepted:
        """Signature of `accept_chains`."""
        counts = limits[slots]
        counts[1::2] = 0
        is_committed = torch.arange(picks.shape[1]) <= counts[:, None]
        return Accepted(counts, torch.where(is_committed, WORDS[0], -1))

    def installed(self) -> ExitStack:
        stack = ExitStack()
        for owner, name, fake in (
            (native, "library", lambda: None),
            (GraphBatch, "_graph", lambda batch, *args: self.graph(batch, *args)),
            (InflightStep, "wait", lambda step: self.wait(step)),
            (mixed_steps.InflightMixed, "draft_seconds", property(self.draft_seconds)),
            (gpu_pass, "gpu_forward", self.forward),
            (gpu_ragged, "gpu_forward", self.forward),
            (gpu_ragged, "head_logits", self.head),
            (gpu_mixed, "head_logits", self.head),
            (gpu_mixed, "place_slots", lambda *args: None),
            (mixed_steps, "sample", self.sample),
            (mixed_steps, "commit_rows", lambda *args, **options: None),
            (mixed_steps, "accept_chains", self.accept),
            (DecoderModel, "forward", lambda model, *args, **options: self.forward(model, *args, **options)),
        ):
            stack.enter_context(patch.object(owner, name, fake))
        return stack

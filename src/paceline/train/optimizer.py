"""The optimizer of a draft and its learning-rate schedule."""

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class LearningRate:
    """Learning rate and length of a training: a linear warm-up, then a cosine to zero.

    The training ends after `steps` or `seconds`, whichever comes first.
    """

    learning_rate: float = 1e-3
    steps: int | None = None
    seconds: float | None = None
    warmup: int = 100

    def done(self, step: int, seconds: float) -> float:
        """The share of the training that is done. It is 1 at the end."""
        by_steps = step / self.steps if self.steps else 0.0
        by_clock = seconds / self.seconds if self.seconds else 0.0
        return min(1.0, max(by_steps, by_clock))

    def rate(self, step: int, seconds: float) -> float:
        warm = min(1.0, (step + 1) / self.warmup)
        return self.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * self.done(step, seconds)))


class DraftOptimizer:
    """Muon for matrices, AdamW for all other weights, with one learning rate: Muon's steps are scaled to AdamW's size."""

    def __init__(self, draft: nn.Module) -> None:
        trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
        self._trained = trained
        matrices = [parameter for parameter in trained if parameter.ndim == 2]
        others = [parameter for parameter in trained if parameter.ndim != 2]
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            self._parts.append(torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
        if others:
            fused = others[0].device.type == "cuda"
            self._parts.append(torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=fused))

    def step(self, rate: float) -> None:
        """Apply the current gradients, clipped to norm 1, and clear them."""
        nn.utils.clip_grad_norm_(self._trained, 1.0)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            with warnings.catch_warnings():
                # Muon computes in bf16; a CPU without bf16 falls back with this warning.
                warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
                part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, content: list[dict[str, Any]]) -> None:
        for part, state in zip(self._parts, content, strict=True):
            part.load_state_dict(state)

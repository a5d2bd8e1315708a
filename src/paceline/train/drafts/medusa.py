"""Medusa heads in training: head k predicts k tokens ahead from the target's last hidden state."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from paceline.train.drafts.draft import Draft, Objective, Predictions
from paceline.train.drafts.target import States, Target


class MedusaDraft(Draft):
    kind = "medusa"
    objective: ClassVar[Objective] = Objective(depth=4, decay=0.8)

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.heads = nn.ModuleDict({str(k): nn.Linear(hidden_size, hidden_size) for k in range(1, num_heads + 1)})
        for parameter in self.heads.parameters():
            nn.init.zeros_(parameter)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> "MedusaDraft":
        return cls(settings["hidden_size"], settings["num_heads"])

    def settings(self) -> dict[str, Any]:
        return {"num_heads": self.num_heads}

    def calibrate(self, target: Target, states: States) -> None:
        """Does nothing, because a new head returns the target's own state."""

    def predict(self, target: Target, states: States, depth: int) -> Predictions:
        depth = min(depth, self.num_heads)
        h = states.last.float()  # [B, S, D]
        hidden = []
        for k in range(1, depth + 1):
            ahead = h[:, :-k] + F.silu(self.heads[str(k)](h[:, :-k])).float()
            hidden.append(F.pad(ahead, (0, 0, k, 0)))  # from row i head k predicts the state of row i+k
        return Predictions(torch.stack(hidden), tuple(range(1, depth + 1)))

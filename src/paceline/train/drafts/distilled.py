"""A small Llama in training that uses the target's embedding and head."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from paceline.train.drafts.draft import Draft, Objective, Predictions, shape_from, shape_settings
from paceline.train.drafts.layers import Layer, LayerShape, RMSNorm, initialize
from paceline.train.drafts.target import States, Target


class DistilledDraft(Draft):
    kind = "distilled"
    objective: ClassVar[Objective] = Objective(depth=1)
    is_same_at_every_depth = True

    def __init__(self, shape: LayerShape, num_layers: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed_norm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_eps)
        initialize(self.layers, shape.hidden_size)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> "DistilledDraft":
        return cls(shape_from(settings), settings["num_layers"])

    def settings(self) -> dict[str, Any]:
        return shape_settings(self.shape) | {"num_layers": len(self.layers)}

    @torch.no_grad()
    def calibrate(self, target: Target, states: States) -> None:
        self.norm.weight.fill_(float(target.norm.weight.float().abs().mean()))

    def predict(self, target: Target, states: States, depth: int) -> Predictions:
        rotary = target.rotary.at(slice(states.ids.shape[1]))
        x = self.embed_norm(F.embedding(states.ids, target.embedding).float())
        for layer in self.layers:
            x = layer(x, rotary)
        return Predictions(self.norm(x)[None], (0,))

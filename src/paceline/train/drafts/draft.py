"""The interface of drafts in training, and low-rank adaptation.

In a round whose last committed token is at position p, a draft predicts the tokens at p+1, p+2, … `Predictions` holds the
hidden states from which the target's head computes each draft token. A draft token counts only if all before it were
accepted, so the target's own text is the context of every prediction.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from paceline.train.drafts.layers import FeedForward, LayerShape
from paceline.train.drafts.target import States, Target


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    hidden: Tensor
    """[U, B, S, D]: row j at depth u predicts token j+1 as the (u+1)-th token of its round. The target predicts the same token
    from its last hidden state of row j."""
    first: tuple[int, ...]
    """The first row with a prediction, for each depth. Rows before it are padding."""


@dataclass(frozen=True, slots=True)
class Objective:
    """loss = sum over depths u of decay^u KL(p || q)"""

    depth: int
    decay: float = 1.0


class Draft(nn.Module):
    """A draft in training. The names of `state_dict()` are those of the saved folder."""

    kind: ClassVar[str]
    objective: ClassVar[Objective]
    is_same_at_every_depth: ClassVar[bool] = False
    """Whether predictions depend on tokens only, and so not on the depth."""
    state_layers: tuple[int, ...] = ()
    """Layers of the target whose outputs the draft reads, counted from 1."""

    def states(self, target: Target, ids: Tensor) -> States:
        """What `predict` reads of `ids` [B, S]. If predictions depend on tokens only, the target computes nothing."""
        if self.is_same_at_every_depth:
            return States(ids, target.embedding.new_empty(*ids.shape, 0), None)
        return target.states(ids, self.state_layers)

    @abstractmethod
    def predict(self, target: Target, states: States, depth: int) -> Predictions: ...

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The draft's entries of config.json. `from_settings` rebuilds the draft from them."""

    @abstractmethod
    def calibrate(self, target: Target, states: States) -> None:
        """Set scales from the first batch, before the first step of a new draft."""

    def recalibrate(self, states: States) -> None:
        """Restore the scales that a saved draft has folded in, from the first batch. Predictions stay the same."""
        return

    def weights(self) -> dict[str, Tensor]:
        """The weights of the saved folder, with scales folded in."""
        return {name: value.detach() for name, value in self.state_dict().items()}

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def shape_settings(shape: LayerShape) -> dict[str, Any]:
    return {
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "ffn_size": shape.ffn_size,
    }


def shape_from(settings: dict[str, Any]) -> LayerShape:
    names = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "rms_eps")
    return LayerShape(**{name: settings[name] for name in names})


def widen(draft: Draft, shape: LayerShape, ffn_size: int) -> LayerShape:
    """Enlarge every feed-forward block of a draft and return its new shape. Predictions stay the same."""
    for module in draft.modules():
        if isinstance(module, FeedForward):
            module.widen(ffn_size)
    return replace(shape, ffn_size=ffn_size)


class LowRank(nn.Module):
    """W + B A / sqrt(r). B starts at zero, so the weight is unchanged at first."""

    def __init__(self, outputs: int, inputs: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, inputs) * inputs**-0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        self.scale = rank**-0.5

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.up @ self.down)


def add_lora(draft: Draft, rank: int) -> None:
    """Freeze the draft and add a trainable low-rank term to every matrix."""
    draft.requires_grad_(False)
    for module in list(draft.modules()):
        if isinstance(module, nn.Linear):
            outputs, inputs = module.weight.shape
            addition = LowRank(outputs, inputs, min(rank, outputs, inputs))
            parametrize.register_parametrization(module, "weight", addition)


def merge_lora(draft: Draft) -> None:
    """Fold the low-rank terms into the matrices."""
    for module in list(draft.modules()):
        if isinstance(module, nn.Linear) and parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)

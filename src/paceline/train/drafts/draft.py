"""What the three kinds of draft have in common in training.

In a round whose last committed token is at position p, a draft guesses the tokens at p+1, p+2, … All kinds are trained
and judged on `Guesses`: the hidden states from which the target's own head reads the guess for each place and depth. A
draft token counts only if all before it were the target's, so the text the target wrote is the context a draft meets.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from paceline.train.drafts.layers import LayerShape
from paceline.train.drafts.target import States, Target


@dataclass(frozen=True, slots=True, eq=False)
class Guesses:
    hidden: Tensor
    """[U, B, S, D]: row j at depth u guesses token j+1 as the (u+1)-th token of its round, which is the guess that the
    target makes from its last hidden state of row j."""
    first: tuple[int, ...]
    """Per depth the first row that has a guess; what lies before is padding."""


@dataclass(frozen=True, slots=True)
class Objective:
    """loss = sum over depths u of decay^u (KL(p || q) + feature_weight * smooth-L1 of the hidden states)."""

    depth: int
    decay: float = 1.0
    feature_weight: float = 0.0


class Draft(nn.Module):
    """Weights in training. `state_dict()` names are those of the saved folder."""

    kind: ClassVar[str]
    objective: ClassVar[Objective]
    same_at_every_depth: ClassVar[bool] = False
    """It reads tokens only: one row of guesses, the same wherever in a round the place comes."""
    capture: tuple[int, ...] = ()
    """Inner states of the target it needs, by layers passed."""

    @abstractmethod
    def guess(self, target: Target, states: States, depth: int) -> Guesses: ...

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Its own part of config.json; the class rebuilds itself from it with `from_settings`."""

    @abstractmethod
    def calibrate(self, target: Target, states: States) -> None:
        """Set scales from a first batch, before the first step of a fresh draft."""

    def weights(self) -> dict[str, Tensor]:
        """As the saved folder has them: scales folded in."""
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

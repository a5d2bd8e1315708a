"""What a pass of a model returns."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ForwardOutput:
    """T rows computed, R of them turned into logits, D the hidden size."""

    logits: Tensor | None  # [R, V] float32; None when no rows were asked for
    last_hidden: Tensor | None  # [T, D], after the final norm; None unless asked for
    inner: Mapping[int, Tensor]  # layer -> [T, D], the hidden state that enters it

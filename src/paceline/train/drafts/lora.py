"""Low-rank adaptation: a trained draft learns a domain's text by small additions that are merged when it is saved."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from paceline.train.drafts.draft import Draft


class LowRank(nn.Module):
    """W + B A / sqrt(r), B zero at first: nothing changes until something is learnt."""

    def __init__(self, outputs: int, inputs: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, inputs) * inputs**-0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        self.scale = rank**-0.5

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.up @ self.down)


def add_lora(draft: Draft, rank: int) -> None:
    """Freeze the draft and give every matrix a low-rank addition to train."""
    draft.requires_grad_(False)
    for module in list(draft.modules()):
        if isinstance(module, nn.Linear):
            outputs, inputs = module.weight.shape
            addition = LowRank(outputs, inputs, min(rank, outputs, inputs))
            parametrize.register_parametrization(module, "weight", addition)


def merge_lora(draft: Draft) -> None:
    """Back to plain matrices, the additions in them."""
    for module in list(draft.modules()):
        if isinstance(module, nn.Linear) and parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)

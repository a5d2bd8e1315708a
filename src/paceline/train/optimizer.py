"""How weights are moved: matrices by Muon, whose steps are as long in every direction, everything else by AdamW."""

import warnings
from typing import Any

import torch
from torch import nn


class DraftOptimizer:
    """Both are given the same rate: Muon's steps are scaled to the size that AdamW's would have."""

    def __init__(self, draft: nn.Module) -> None:
        learnt = [parameter for parameter in draft.parameters() if parameter.requires_grad]
        self._learnt = learnt
        matrices = [parameter for parameter in learnt if parameter.ndim == 2]
        others = [parameter for parameter in learnt if parameter.ndim != 2]
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            self._parts.append(torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
        if others:
            fused = others[0].device.type == "cuda"
            self._parts.append(torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=fused))

    def step(self, rate: float) -> None:
        """Along the gradients that are there, cut to a norm of one."""
        nn.utils.clip_grad_norm_(self._learnt, 1.0)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            with warnings.catch_warnings():
                # Muon computes in bf16; a CPU without it takes another way, which is all that torch has to say
                warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
                part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, content: list[dict[str, Any]]) -> None:
        for part, state in zip(self._parts, content, strict=True):
            part.load_state_dict(state)

"""The target's states of the text, computed when first needed and kept where all of them fit."""

import os

import torch
from torch import Tensor

from paceline.train.drafts.target import States, Target

SHARE = 0.6
"""Of the memory that is free when training begins."""


class KeptStates:
    """Rows of text as the target sees them. A row that comes again, in a later epoch, costs a copy instead of a pass."""

    def __init__(self, target: Target, ids: Tensor, capture: tuple[int, ...], room: int | None = None) -> None:
        """`ids` [N, S] on the target's device; `room` in bytes, None: what can be spared."""
        self._target, self._ids, self._capture = target, ids, capture
        width = (1 + len(capture)) * target.config.hidden_size  # the last state, then the inner ones
        size = ids.numel() * width * target.dtype.itemsize
        self.keeps = size <= (_free_bytes(target.device) * SHARE if room is None else room)
        self._known = torch.zeros(len(ids), dtype=torch.bool)
        if self.keeps:
            self._kept = torch.empty(*ids.shape, width, dtype=target.dtype, device=target.device)

    def of(self, rows: Tensor) -> States:
        """`rows` [B] int64, on the host."""
        where = rows.to(self._ids.device)
        ids = self._ids[where].long()
        if not self.keeps:
            return self._target.states(ids, self._capture)
        size = self._target.config.hidden_size
        if bool(self._known[rows].all()):
            last, inner = self._kept[where].split([size, self._kept.shape[-1] - size], -1)
            return States(ids, last, inner if self._capture else None)
        states = self._target.states(ids, self._capture)
        both = states.last if states.inner is None else torch.cat([states.last, states.inner], -1)
        self._kept[where] = both
        self._known[rows] = True
        return states


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

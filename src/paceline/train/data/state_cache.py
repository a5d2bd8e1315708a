"""The target's hidden states of the text, computed at first use and cached if all of them fit."""

import os

import torch
from torch import Tensor

from paceline.train.drafts.target import States, Target

SHARES = {"cuda": 0.8, "cpu": 0.6}
"""Share of the free memory that the cache may take."""


class StateCache:
    """Hidden states by row of text. A row of a later epoch costs a copy instead of a forward pass."""

    def __init__(
        self, target: Target, ids: Tensor, state_layers: tuple[int, ...], max_bytes: int | None = None
    ) -> None:
        """`ids` [N, S] are on the target's device. If `max_bytes` is None, the limit is a share of the free memory."""
        self._target, self._ids, self._state_layers = target, ids, state_layers
        width = (1 + len(state_layers)) * target.config.hidden_size  # last state, then captured layers
        size = ids.numel() * width * target.dtype.itemsize
        if max_bytes is None:
            max_bytes = int(_free_bytes(target.device) * SHARES[target.device.type])
        self.is_caching = size <= max_bytes
        self._is_cached = torch.zeros(len(ids), dtype=torch.bool)
        if self.is_caching:
            self._cache = torch.empty(*ids.shape, width, dtype=target.dtype, device=target.device)

    def of(self, rows: Tensor) -> States:
        """`rows` [B] int64, on the host."""
        where = rows.to(self._ids.device)
        ids = self._ids[where].long()
        if not self.is_caching:
            return self._target.states(ids, self._state_layers)
        size = self._target.config.hidden_size
        if bool(self._is_cached[rows].all()):
            last, inner = self._cache[where].split([size, self._cache.shape[-1] - size], -1)
            return States(ids, last, inner if self._state_layers else None)
        states = self._target.states(ids, self._state_layers)
        both = states.last if states.inner is None else torch.cat([states.last, states.inner], -1)
        self._cache[where] = both
        self._is_cached[rows] = True
        return states


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

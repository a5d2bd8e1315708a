"""The sequences of a batch on the device: their lengths, last tokens and sampling parameters, by slot."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from paceline.core.sampling import SamplingParams
from paceline.engine.memory_fit import PICKING_BYTES
from paceline.kernels.gpu.speculation.accept import DeviceState
from paceline.kernels.gpu.speculation.pick import PickScratch, pick, pick_greedy, pick_scratch, pick_truncated
from paceline.speculation.verification.noise import Purpose, stream

Sampling = Literal["greedy", "sampled", "truncated"]
"""The simplest sampling kernel that serves every slot."""


class Slot(NamedTuple):
    """One sequence, as the batch loads it."""

    ids: Seq[int]
    sampling: SamplingParams
    seed: int
    choice: int


class DeviceSlots:
    """Written when a batch is loaded; every step updates `state`. Empty slots are greedy sequences of two tokens."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self.state = DeviceState(
            torch.full((size,), 2, dtype=torch.int32, device=device),
            torch.zeros(size, 2, dtype=torch.int64, device=device),
        )
        self.streams = torch.zeros(size, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(size, dtype=torch.float32, device=device)  # 0: greedy
        self.top_k = torch.zeros(size, dtype=torch.int64, device=device)
        self.top_p = torch.ones(size, dtype=torch.float64, device=device)
        self.min_p = torch.zeros(size, dtype=torch.float32, device=device)
        self.sampling: Sampling = "greedy"

    def load(self, slots: Seq[Slot]) -> None:
        """Replace the contents with these sequences, in this order."""
        padding = self.size - len(slots)
        params = [slot.sampling for slot in slots]
        self.state.lengths.copy_(_tensor([len(slot.ids) for slot in slots] + [2] * padding, torch.int32))
        self.state.last.copy_(_tensor([list(slot.ids[-2:]) for slot in slots] + [[0, 0]] * padding, torch.int64))
        streams = [stream(Purpose.SHARED, slot.seed, slot.choice) for slot in slots]
        self.streams.copy_(_tensor([s - (1 << 64) if s >> 63 else s for s in streams] + [0] * padding, torch.int64))
        self.temperature.copy_(_tensor([0.0 if p.is_greedy else p.temperature for p in params] + [0.0] * padding))
        self.top_k.copy_(_tensor([p.top_k for p in params] + [0] * padding, torch.int64))
        self.top_p.copy_(_tensor([p.top_p for p in params] + [1.0] * padding, torch.float64))
        self.min_p.copy_(_tensor([p.min_p for p in params] + [0.0] * padding))
        if all(p.is_greedy for p in params):
            self.sampling = "greedy"
        else:
            is_whole = all(p.is_greedy or not (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0) for p in params)
            self.sampling = "sampled" if is_whole else "truncated"

    def picker(self, rows: int) -> Callable[[Tensor, Tensor], Tensor]:
        """A function (logits [size * rows, V], positions of the picked tokens) -> tokens; `rows` rows of each slot are
        adjacent."""
        scratch: dict[int, PickScratch] = {}
        sampling = self.sampling

        def spread(values: Tensor) -> Tensor:
            return values if rows == 1 else values.repeat_interleave(rows)

        def choose(logits: Tensor, positions: Tensor) -> Tensor:
            width = logits.shape[1]
            if width not in scratch:
                scratch[width] = pick_scratch(self.size * rows, width, self.device)
            if sampling == "greedy":
                return pick_greedy(logits, scratch[width])
            noise = spread(self.temperature), spread(self.streams), positions
            if sampling == "sampled":
                return pick(logits, *noise, scratch[width])
            limits = spread(self.top_k), spread(self.top_p), spread(self.min_p)
            return pick_truncated(logits, *noise, *limits, scratch[width], max_bytes=PICKING_BYTES)

        return choose


def _tensor(values: list[Any], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)

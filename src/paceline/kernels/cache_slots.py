"""Copies of slots in the paged caches of all layers of a model, on a CPU in one native call."""

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.cpu import native
from paceline.kernels.layout import BLOCK_SIZE
from paceline.kernels.quantized import put, take


class CacheSlots:
    """The slots of all caches of a model, [num_blocks, BLOCK_SIZE, …] each, of one shape and type."""

    def __init__(self, caches: Sequence[Tensor]) -> None:
        self._caches, first = caches, caches[0]
        self._num_slots = len(first) * BLOCK_SIZE
        self._addresses: ctypes.Array[ctypes.c_void_p] | None = None
        if first.is_cpu and all(one.is_contiguous() and one.nbytes == first.nbytes for one in caches):
            # Collected once: it takes longer than the copies of a few slots
            self._addresses = (ctypes.c_void_p * len(caches))(*(one.data_ptr() for one in caches))

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots of every cache. All slots are read before any is written."""
        if not sources:
            return
        loaded = native.library() if self._addresses is not None else None
        if loaded is None:
            copy_slots_reference(self._caches, sources, targets)
            return
        if not (min(*sources, *targets) >= 0 and max(*sources, *targets) < self._num_slots):
            raise IndexError(f"slots must be in [0, {self._num_slots})")
        read, written = array("q", sources), array("q", targets)
        assert len(read) == len(written)
        loaded.quick.paceline_copy_slots(
            self._addresses,
            len(self._caches),
            read.buffer_info()[0],
            written.buffer_info()[0],
            len(read),
            self._caches[0].nbytes // self._num_slots,
        )


def copy_slots_reference(caches: Sequence[Tensor], sources: Sequence[int], targets: Sequence[int]) -> None:
    source, target = (torch.tensor(slots, device=caches[0].device) for slots in (sources, targets))
    for values in caches:
        flat = values.view(-1, *values.shape[2:])
        put(flat, target, take(flat, source))

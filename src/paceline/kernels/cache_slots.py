"""Copies of slots in the paged caches of all layers of a model, on a CPU in one native call."""

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.cpu import native
from paceline.kernels.layout import BLOCK_SIZE
from paceline.kernels.quantized import put, take


def copy_slots(caches: Sequence[Tensor], sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy slots of every cache [num_blocks, BLOCK_SIZE, …]; all are of one shape and type. All slots are read before any is
    written."""
    if not sources:
        return
    loaded, first = native.library(), caches[0]
    if loaded is None or not first.is_cpu or not all(one.is_contiguous() for one in caches):
        copy_slots_reference(caches, sources, targets)
        return
    num_slots = len(first) * BLOCK_SIZE
    if not (min(*sources, *targets) >= 0 and max(*sources, *targets) < num_slots):
        raise IndexError(f"slots must be in [0, {num_slots})")
    assert all(one.nbytes == first.nbytes for one in caches)
    addresses = (ctypes.c_void_p * len(caches))(*(one.data_ptr() for one in caches))
    read, written = array("q", sources), array("q", targets)
    assert len(read) == len(written)
    loaded.quick.paceline_copy_slots(
        addresses, len(caches), read.buffer_info()[0], written.buffer_info()[0], len(read), first.nbytes // num_slots
    )


def copy_slots_reference(caches: Sequence[Tensor], sources: Sequence[int], targets: Sequence[int]) -> None:
    source, target = (torch.tensor(slots, device=caches[0].device) for slots in (sources, targets))
    for values in caches:
        flat = values.view(-1, *values.shape[2:])
        put(flat, target, take(flat, source))

"""Copies of slots and blocks of the paged caches of all layers of a model, in one native call or one launch."""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.cpu import native
from paceline.kernels.formats.quantized import put, take


class CacheSlots:
    """The slots of all caches of a model, [num_blocks, BLOCK_SIZE, …] each, of one shape and type."""

    def __init__(self, caches: Sequence[Tensor]) -> None:
        self._caches, first = caches, caches[0]
        self._num_slots = len(first) * BLOCK_SIZE
        self._addresses: ctypes.Array[ctypes.c_void_p] | None = None
        if first.is_cpu and all(cache.is_contiguous() and cache.nbytes == first.nbytes for cache in caches):
            # Collected once: it takes longer than the copies of a few slots
            self._addresses = (ctypes.c_void_p * len(caches))(*(cache.data_ptr() for cache in caches))

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


@dataclass(frozen=True, slots=True)
class Planes:
    """Rows in memory: row `i` of a plane has `row_bytes` bytes, `i * stride` bytes after its address. The memory must exist as
    long as a copy runs."""

    device: torch.device
    addresses: tuple[int, ...]
    stride: int
    row_bytes: int
    """A multiple of 8."""

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> "Planes":
        """Contiguous tensors of one shape and type; their first dimension is that of the rows."""
        first = tensors[0]
        assert all(
            tensor.is_contiguous() and tensor.shape == first.shape and tensor.device == first.device
            for tensor in tensors
        )
        row = first.nbytes // len(first)
        return Planes(first.device, tuple(tensor.data_ptr() for tensor in tensors), row, row)

    @staticmethod
    def interleaved(device: torch.device, address: int, num_planes: int, row_bytes: int) -> "Planes":
        """One array [rows, num_planes, row_bytes]."""
        addresses = tuple(address + i * row_bytes for i in range(num_planes))
        return Planes(device, addresses, num_planes * row_bytes, row_bytes)


def copy_rows(source: Planes, read: Sequence[int], target: Planes, written: Sequence[int]) -> None:
    """Copy row `read[i]` of every plane of `source` to row `written[i]` of `target`, on one device. On a GPU it only starts.
    Rows must exist; the two memories do not overlap."""
    assert source.row_bytes == target.row_bytes
    assert len(source.addresses) == len(target.addresses)
    assert len(read) == len(written)
    if not read:
        return
    if source.device.type == "cuda":
        from paceline.kernels.gpu.cache.rows import copy_rows as launch

        addresses = source.addresses, target.addresses
        launch(*addresses, read, written, (source.stride, target.stride), source.row_bytes, source.device)
        return
    loaded = native.library()
    if loaded is None:
        copy_rows_reference(source, read, target, written)
        return
    tables = [array("q", values) for values in (source.addresses, target.addresses, read, written)]
    sources, targets, rows, other_rows = (table.buffer_info()[0] for table in tables)
    loaded.long.paceline_copy_rows(
        sources,
        source.stride,
        targets,
        target.stride,
        len(source.addresses),
        rows,
        other_rows,
        len(read),
        source.row_bytes,
    )


def copy_rows_reference(source: Planes, read: Sequence[int], target: Planes, written: Sequence[int]) -> None:
    for at, other in zip(source.addresses, target.addresses, strict=True):
        for row, other_row in zip(read, written, strict=True):
            ctypes.memmove(other + other_row * target.stride, at + row * source.stride, source.row_bytes)

"""GPU memory shared between processes by CUDA IPC, through the driver's own functions.

torch can share tensors too, but counts one receiver for each send. A worker does not know how many other workers map its
memory.
"""

import ctypes
import secrets
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paceline.runtime.transfer.messages import ID_BYTES, MemoryRegion
from paceline.runtime.transfer.transfer import ChannelUnavailable

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1
"""Flag of the driver: memory of another GPU becomes accessible when it is used."""
PROCESS = secrets.token_bytes(ID_BYTES)


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class _Driver:
    """Calls of the CUDA driver in the context that torch uses for a device."""

    def __init__(self, device: int) -> None:
        """Raises ChannelUnavailable without a driver."""
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ChannelUnavailable(f"the CUDA driver cannot be loaded: {error}") from None
        self._context = ctypes.c_void_p()
        number = ctypes.c_int()
        self.call("cuInit", ctypes.c_uint(0))
        self.call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
            reason = text.value.decode() if text.value else f"error {code}"
            raise ChannelUnavailable(f"GPU memory cannot be shared with another process: {name} returned {reason}")

    @contextmanager
    def context(self) -> Iterator[None]:
        """Make the context current: threads of this process may not have used the device yet."""
        self.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def export(self, address: int) -> tuple[bytes, int]:
        """Handle of the allocation that contains `address`, and the offset of the address in it."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        with self.context():
            where = ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
            self.call("cuMemGetAddressRange_v2", *where)
            self.call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle), address - base.value

    def map(self, handle: bytes) -> int:
        """Address of another process's allocation in this process."""
        address = ctypes.c_uint64()
        with self.context():
            given = ctypes.byref(address), _Handle.from_buffer_copy(handle), ctypes.c_uint(LAZY_PEER_ACCESS)
            self.call("cuIpcOpenMemHandle_v2", *given)
        return address.value

    def unmap(self, address: int) -> None:
        with self.context():
            self.call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


class _Allocation:
    """An allocation of another process, mapped once and counted: the driver maps a handle once in a process."""

    def __init__(self, address: int) -> None:
        self.address, self.users = address, 0


class _Bytes:
    """A range of mapped memory, as torch reads memory of other libraries."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 2
        }  # fmt: skip


@cache
def _driver(device: int) -> _Driver:
    return _Driver(device)


_mapped: dict[tuple[int, bytes], _Allocation] = {}
"""Allocations that this process has mapped, by device and handle."""
_lock = threading.RLock()
"""Lock of `_mapped`. A tensor may be freed on the thread that holds it."""


class CudaMemory:
    """A `DeviceMemory`."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)

    def share(self, tensor: Tensor) -> MemoryRegion:
        if not tensor.is_cuda or not tensor.is_contiguous():
            raise ChannelUnavailable("only contiguous GPU memory can be shared")
        if not tensor.nbytes:
            return MemoryRegion(PROCESS, b"", 0, 0)
        handle, offset = _driver(tensor.get_device()).export(tensor.data_ptr())
        return MemoryRegion(PROCESS, handle, offset, tensor.nbytes)

    def open(self, region: MemoryRegion) -> Tensor:
        if not region.size:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        if region.process == PROCESS or len(region.handle) != HANDLE_BYTES:
            raise ChannelUnavailable("the memory belongs to this process, or has no handle")
        address = self._acquire(region.handle) + region.offset
        view = _Bytes(address, region.size)  # which the tensor keeps
        weakref.finalize(view, self._release, region.handle).atexit = False
        found = torch.as_tensor(view, device=self.device)
        if found.data_ptr() != address:  # torch made a copy
            raise ChannelUnavailable("the memory of that GPU is not accessible from this one")
        return found

    def _release(self, handle: bytes) -> None:
        """One range of the allocation is no longer used."""
        key = self.device.index, handle
        with _lock:
            allocation = _mapped[key]
            allocation.users -= 1
            if not allocation.users:
                del _mapped[key]
                with suppress(ChannelUnavailable):  # the process that had the memory may be gone
                    _driver(self.device.index).unmap(allocation.address)

    def _acquire(self, handle: bytes) -> int:
        """Address of the allocation, for one more range of it."""
        key = self.device.index, handle
        with _lock:
            if key not in _mapped:
                _mapped[key] = _Allocation(_driver(self.device.index).map(handle))
            _mapped[key].users += 1
            return _mapped[key].address

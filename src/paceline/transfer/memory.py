"""Memory that a worker offers to others: the transfers by id, and device memory that processes of one machine share.

`DeviceMemory` is memory of a device that other processes of this machine map and read in place, without a copy on the host.
`CudaMemory` shares GPU memory by CUDA IPC, through the driver's own functions. torch can share tensors too, but counts one
receiver for each send. A worker does not know how many other workers map its memory.

`Registry` has the transfers that a server offers, by id.
"""

import ctypes
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.transfer.transfer import ChannelUnavailable, Transfer
from paceline.wire.transfer_messages import ID_BYTES, MemoryRegion
from paceline.wire.transport import Wakeup


class DeviceMemory(Protocol):
    """Any thread may use it."""

    def share(self, tensor: Tensor) -> MemoryRegion:
        """The memory of a contiguous tensor, which must stay allocated while other processes read it. Raises ChannelUnavailable
        if no other process can map it."""
        ...

    def open(self, region: MemoryRegion) -> Tensor:
        """The bytes of a region of another process. They stay mapped as long as the tensor exists. Raises ChannelUnavailable
        if this process cannot map it."""
        ...


def device_memory(device: torch.device, channels: Sequence[str] | None) -> DeviceMemory | None:
    """The memory of `device`. None if it cannot be shared, or if `channels` exclude shared memory on one machine."""
    if device.type != "cuda" or (channels is not None and "memory" not in channels):
        return None

    return CudaMemory(device)


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


class Registry:
    """Any thread may use it. It wakes the server's thread when a transfer changes."""

    def __init__(self, wakeup: Wakeup) -> None:
        self._wakeup = wakeup
        self._transfers: dict[bytes, tuple[Transfer, Callable[[], None]]] = {}
        """Transfer and its listener."""
        self._changed: deque[bytes] = deque()
        self._lock = threading.Lock()

    def add(self, transfer: Transfer) -> bytes:
        """Register a transfer under a new random id and return the id."""
        id = secrets.token_bytes(ID_BYTES)

        def on_change() -> None:
            self._changed.append(id)
            if len(self._changed) == 1:  # otherwise the server has a notice, and takes all changes at once
                self._wakeup.notify()

        with self._lock:
            self._transfers[id] = transfer, on_change
        transfer.subscribe(on_change)
        return id

    def get(self, id: bytes) -> Transfer | None:
        with self._lock:
            return self._transfers.get(id, (None,))[0]

    def remove(self, id: bytes) -> None:
        """An unknown id is no error."""
        with self._lock:
            found = self._transfers.pop(id, None)
        if found is not None:
            transfer, on_change = found
            transfer.unsubscribe(on_change)
            on_change()

    def clear(self) -> None:
        for id in list(self._transfers):
            self.remove(id)

    def pop_changed(self) -> Iterator[bytes]:
        """Ids of transfers that were filled, aborted or removed since the last call."""
        while self._changed:
            yield self._changed.popleft()

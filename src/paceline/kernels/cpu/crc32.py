"""zlib's CRC-32, of bytes or of a copy that is being made of them, at the speed of memory where there are native kernels."""

import ctypes
import zlib

import numpy as np

from paceline.kernels.cpu import native


def crc32(data: memoryview) -> int:
    """Of contiguous bytes. Other threads run meanwhile."""
    return _run(data, None)


def copy_crc32(data: memoryview, copy: memoryview) -> int:
    """Writes `data` to `copy`, of the same size and elsewhere, in one pass. Its CRC-32."""
    if copy.nbytes != data.nbytes or copy.readonly:
        raise ValueError(f"{data.nbytes} bytes do not go into {copy.nbytes}{', read-only' if copy.readonly else ''}")
    return _run(data, copy)


def crc32_reference(data: memoryview) -> int:
    return zlib.crc32(data)


def copy_crc32_reference(data: memoryview, copy: memoryview) -> int:
    copy[:] = data
    return zlib.crc32(copy)


def _run(data: memoryview, copy: memoryview | None) -> int:
    library = native.library()
    if library is None:
        return crc32_reference(data) if copy is None else copy_crc32_reference(data, copy)
    result = ctypes.c_uint32()
    # Held until the call has ended: the addresses are theirs
    source, target = np.frombuffer(data, np.uint8), None if copy is None else np.frombuffer(copy, np.uint8)
    library.long.paceline_crc32(
        source.ctypes.data, source.nbytes, None if target is None else target.ctypes.data, ctypes.byref(result)
    )
    return result.value

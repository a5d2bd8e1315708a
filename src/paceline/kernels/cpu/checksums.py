"""Checksums: CRC-32 as in zlib, optionally while copying, and sums of 64-bit words. Native kernels run at memory speed.

Each word of `word_sum` counts times an odd factor by its place, modulo 2^64.
"""

import ctypes
import zlib

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.cpu import native


def crc32(data: memoryview) -> int:
    """CRC-32 of contiguous bytes. Releases the interpreter lock."""
    return _run(data, None)


def copy_crc32(data: memoryview, copy: memoryview) -> int:
    """CRC-32 of `data`, which is copied to `copy` in the same pass. `data` and `copy` have the same size and do not overlap."""
    if copy.nbytes != data.nbytes or copy.readonly:
        raise ValueError(
            f"cannot copy {data.nbytes} bytes to {copy.nbytes}{' read-only' if copy.readonly else ''} bytes"
        )
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
    # Keep references until the call returns: it uses their addresses
    source, target = np.frombuffer(data, np.uint8), None if copy is None else np.frombuffer(copy, np.uint8)
    library.long.paceline_crc32(
        source.ctypes.data, source.nbytes, None if target is None else target.ctypes.data, ctypes.byref(result)
    )
    return result.value


def word_sum(words: Tensor) -> int:
    """Sum of `words[i] * (2 i + 1)` as an unsigned integer. `words` is contiguous int64 on the CPU. The call releases the
    interpreter lock."""
    library = native.library()
    if library is None:
        return int(word_sum_reference(words)) % 2**64
    result = ctypes.c_uint64()
    library.long.paceline_word_sum(words.data_ptr(), words.numel(), ctypes.byref(result))
    return result.value


def word_sum_reference(words: Tensor) -> Tensor:
    """Computes the same sum on any device, as a signed integer."""
    factors = torch.arange(1, 2 * words.numel() + 1, 2, device=words.device)
    return (words * factors).sum()

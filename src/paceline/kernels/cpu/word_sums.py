"""Sums of 64-bit words, each times an odd factor by its place, modulo 2^64. With native kernels they run at memory speed."""

import ctypes

import torch
from torch import Tensor

from paceline.kernels.cpu import native


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

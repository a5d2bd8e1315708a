"""Device of the Triton kernels in these tests: the GPU, or the CPU with the interpreter."""

import torch
from torch import Tensor

from paceline.speculation.rows.noise import NoiseKey, Purpose, stream

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def on_device(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


def stream_of(key: NoiseKey, purpose: Purpose = Purpose.SHARED) -> int:
    """The 64 bits of a stream as a signed integer, the argument of kernels."""
    bits = stream(purpose, key.seed, key.choice)
    return bits - 2**64 if bits >= 2**63 else bits

"""MXFP4: 4-bit floats in groups of 32 with a power of two each, as in gpt-oss checkpoints.

A code has a sign, two exponent bits and a mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4 or 6. Twice the value is a whole number: 8-bit
codes with a scale of 2^(e - 1) are exact. They take twice the memory of the file on a CPU; a GPU packs them again.
"""

import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.weights import FourBit

GROUP = 32
_BIAS = 127
_DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> FourBit:
    """blocks [N, K/32, 16] uint8, the first of two codes in the low half; scales [N, K/32] uint8 -> [N, K]. Exact."""
    if blocks.dtype is not torch.uint8 or scales.dtype is not torch.uint8 or blocks.shape[:2] != scales.shape:
        raise UnsupportedModel(
            f"MXFP4 blocks of {blocks.dtype} {tuple(blocks.shape)} do not match scales of {scales.dtype} "
            f"{tuple(scales.shape)}: download the model again"
        )
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)  # [N, K]
    exponents = scales.to(torch.int32) - _BIAS - 1
    return FourBit(_DOUBLED[codes.long()], torch.ldexp(torch.ones(exponents.shape), exponents), None, GROUP)

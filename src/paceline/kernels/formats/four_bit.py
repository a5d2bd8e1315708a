"""4-bit weights as the GPU kernels read them: tiles of codes, and one word for the scale and the zero of a group.

codes  [N/16, K/G, 16, G/2] bytes: a group of G inputs of 16 outputs is contiguous. Byte j of an output's group holds input j in
       its low half and j + G/2 in its high half.
words  integers: [K/G, N], the scale in the low half, and 128 + zero as bfloat16 in the high half.
       MXFP4: [K/128, N], a byte for each of four groups of 32: the exponent of 2^126 times their scale, as bfloat16 has it.

N is padded to 16 and K to 128. G is 64 for MXFP4: each half of its bytes is a group of 32. No value is rounded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.kernels.formats.weights import FourBit

TILE = 16
"""Outputs of a tile."""
BLOCK = 128
"""Inputs are padded to a multiple of it."""
Kind = Literal["float16", "bfloat16", "mxfp4"]
"""Type of the scales; MXFP4 has powers of two, and codes that are floats."""
KINDS: tuple[Kind, ...] = ("float16", "bfloat16", "mxfp4")
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each code of MXFP4."""
_CODE_OF = torch.tensor([_DOUBLED.index(v) if v in _DOUBLED else 0 for v in range(-16, 16)], dtype=torch.uint8)
"""Code of twice a value, from -16 on."""
_BIAS = 127
_SHIFT = 126
"""What is added to an exponent of MXFP4, because kernels begin with 2^-126 times the value of a code."""


@dataclass(frozen=True, slots=True)
class FourBitForm:
    """Description of a 4-bit weight, without its tensors."""

    outputs: int
    inputs: int
    group: int
    """Inputs of a tile: 32, 64 or 128."""
    kind: Kind


@dataclass(frozen=True, slots=True, eq=False)
class FourBitWeight:
    codes: Tensor  # [N/16, K/G, 16, G/2] uint8
    words: Tensor  # [K/G, N] int32; MXFP4: [K/128, N]
    shape: tuple[int, int]
    """Outputs and inputs without padding."""
    group: int
    """Inputs of a tile: 32, 64 or 128."""
    kind: Kind

    def __post_init__(self) -> None:
        if self.codes.dim() != 4:
            raise ValueError(f"codes {tuple(self.codes.shape)} must have four dimensions")
        (outputs, inputs), (tiles, groups, *rest) = self.shape, self.codes.shape
        if self.group not in (32, 64, 128) or self.kind not in KINDS or min(outputs, inputs) < 1:
            raise ValueError(f"{self.form} does not describe a 4-bit weight")
        if self.codes.dtype is not torch.uint8 or self.words.dtype is not torch.int32:
            raise ValueError(f"codes {self.codes.dtype} and words {self.words.dtype} must be uint8 and int32")
        rows = groups // 2 if self.kind == "mxfp4" else groups
        is_tiled = tiles == -(-outputs // TILE) and groups * self.group == -(-inputs // BLOCK) * BLOCK
        if not is_tiled or rest != [TILE, self.group // 2] or self.words.shape != (rows, tiles * TILE):
            raise ValueError(
                f"codes {tuple(self.codes.shape)} and words {tuple(self.words.shape)} do not match {self.shape} in groups of "
                f"{self.group}"
            )

    @property
    def form(self) -> FourBitForm:
        return FourBitForm(*self.shape, self.group, self.kind)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.words.nbytes

    def to(self, device: torch.device | str) -> "FourBitWeight":
        return FourBitWeight(self.codes.to(device), self.words.to(device), self.shape, self.group, self.kind)

    def dequantize(self) -> Tensor:
        """[N, K] float32."""
        return self.unpack().dequantize()

    def unpack(self) -> FourBit:
        """The matrix before `pack`."""
        outputs, inputs = self.shape
        halves = torch.cat((self.codes & 15, self.codes >> 4), 3).transpose(1, 2).flatten(2).flatten(0, 1)
        codes, words = halves[:outputs, :inputs], self.words[:, :outputs].t()  # [N, K], [N, groups]
        if self.kind == "mxfp4":
            exponents = words.contiguous().view(torch.uint8)[:, : inputs // 32].to(torch.int32) - _SHIFT
            doubled = torch.tensor(_DOUBLED, dtype=torch.int8, device=codes.device)[codes.long()]
            return FourBit(doubled, _power_of_two(exponents - _BIAS - 1), None, 32)
        dtype = torch.float16 if self.kind == "float16" else torch.bfloat16
        parts = words.contiguous().view(torch.int16).unflatten(1, (-1, 2))[:, : inputs // self.group]
        scales = parts[..., 0].contiguous().view(dtype).float()
        zeros = parts[..., 1].contiguous().view(torch.bfloat16).float() - 128.0
        repeats = self.group // 32
        fine, offsets = (values.repeat_interleave(repeats, 1) for values in (scales, -zeros * scales))
        return FourBit(codes.contiguous(), fine, offsets, 32, stored_group=self.group, scale_dtype=dtype)


def pack(weight: FourBit, device: torch.device | str) -> FourBitWeight | None:
    """The matrix for GPU kernels, packed on `device`; None if they cannot read its zeros or exponents."""
    kind: Kind = "mxfp4"
    if weight.codes.dtype is torch.uint8:
        kind = "float16" if weight.scale_dtype is torch.float16 else "bfloat16"
    group = 64 if kind == "mxfp4" else next(size for size in (128, 64, 32) if weight.stored_group % size == 0)
    codes, scales = weight.codes.to(device), weight.scales.to(device)
    offsets = None if weight.offsets is None else weight.offsets.to(device)
    words = _exponents(scales) if kind == "mxfp4" else _scales_and_zeros(scales, offsets, group, weight.scale_dtype)
    if words is None:
        return None
    if kind == "mxfp4":
        codes = _CODE_OF.to(device)[codes.long() + 16]
    return FourBitWeight(_tiles(codes, group), words, weight.shape, group, kind)


def concat(weights: Sequence[FourBitWeight]) -> FourBitWeight | None:
    """One matrix with the outputs of all, in order; None if they differ in format or end within a tile."""
    first = weights[0]
    is_even = all(weight.shape[0] % TILE == 0 for weight in weights[:-1])
    if not is_even or len({(weight.group, weight.kind, weight.shape[1]) for weight in weights}) > 1:
        return None
    codes, words = torch.cat([weight.codes for weight in weights]), torch.cat([weight.words for weight in weights], 1)
    shape = sum(weight.shape[0] for weight in weights), first.shape[1]
    return FourBitWeight(codes, words.contiguous(), shape, first.group, first.kind)


def _tiles(codes: Tensor, group: int) -> Tensor:
    outputs, inputs = codes.shape
    padded = pad(codes, (0, -inputs % BLOCK, 0, -outputs % TILE))
    halves = padded.unflatten(0, (-1, TILE)).unflatten(2, (-1, 2, group // 2))  # [N/16, 16, K/G, 2, G/2]
    return (halves[..., 0, :] | halves[..., 1, :] << 4).transpose(1, 2).contiguous()


def _scales_and_zeros(scales: Tensor, offsets: Tensor | None, group: int, dtype: torch.dtype) -> Tensor | None:
    """[K/G, N] from scales and offsets [N, K/32]; None if a zero is not a small whole number."""
    step = group // 32
    coarse = scales[:, ::step]
    offset = torch.zeros_like(coarse) if offsets is None else offsets[:, ::step]
    zeros = torch.where(coarse == 0, 0.0, -offset / coarse).round()
    if coarse.device.type != "meta" and not bool(((zeros >= 0) & (zeros < 64) & (-zeros * coarse == offset)).all()):
        return None
    low = coarse.to(dtype).view(torch.int16).to(torch.int32) & 0xFFFF
    high = (zeros + 128.0).to(torch.bfloat16).view(torch.int16).to(torch.int32) << 16
    return _padded(low | high, BLOCK // group)


def _exponents(scales: Tensor) -> Tensor | None:
    """[K/128, N] from scales 2^(e - 128) [N, K/32]; None if an e is not in 8 to 128."""
    fractions, exponents = torch.frexp(scales)
    stored = (exponents + _BIAS).to(torch.int32)  # 2^(e - 128) = 0.5 * 2^(e - 127)
    if scales.device.type != "meta" and not bool(((fractions == 0.5) & (stored >= 8) & (stored <= 128)).all()):
        return None
    octets = pad(stored + _SHIFT, (0, -stored.shape[1] % 4)).to(torch.uint8)
    return _padded(octets.contiguous().view(torch.int32), 1)


def _padded(words: Tensor, multiple: int) -> Tensor:
    """Turns [N, C] into [C, N]. N and C are padded."""
    outputs, columns = words.shape
    return pad(words, (0, -columns % multiple, 0, -outputs % TILE)).t().contiguous()


def _power_of_two(exponents: Tensor) -> Tensor:
    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents)

"""The types of GGUF tensors: blocks of half-precision scales and packed codes, laid out as in ggml.

Every quantised type becomes a matrix of 8-bit or 4-bit codes with a scale for 16 or 32 inputs, without rounding. The package
`gguf` has the grids and signs of most types below 4 bits; it is imported when a file has such a type.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.weights import Dense, Grouped, Weight

# Names of ggml types by number, for error messages.
NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip

_LOW_HALVES = 0x0F0F0F0F0F0F0F0F
USABLE = "Q4_K_M, Q5_K_M, Q6_K or Q8_0"
"""Names of quantisations in file names, of which all types are supported."""


def type_name(kind: int) -> str:
    return NAMES.get(kind, f"number {kind}")


def num_bytes(kind: int, num_values: int) -> int:
    found = block_type(kind)
    return num_values // found.block * found.block_bytes


def unpack(kind: int, raw: Tensor, shape: tuple[int, ...]) -> Weight:
    """Weight of `shape` from its stored bytes, `raw` [num_bytes] uint8. Exact: no value is rounded."""
    found = block_type(kind)
    return found.unpack(raw.view(*shape[:-1], shape[-1] // found.block, found.block_bytes))


def _half(raw: Tensor) -> Tensor:
    """[..., 2 n] uint8 -> [..., n] float32"""
    return raw.contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    """[..., n] uint8 -> [..., 2, n]: low halves, then high halves; eight bytes at a time."""
    words = raw.contiguous().view(torch.int64)
    return torch.stack((words & _LOW_HALVES, (words >> 4) & _LOW_HALVES), dim=-2).view(torch.uint8)


def _grouped(codes: Tensor, scales: Tensor, offsets: Tensor | None, group: int) -> Grouped:
    """Blocks of a row joined: codes [N, blocks, ...] -> [N, K]."""
    return Grouped(codes.flatten(1), scales.flatten(1), None if offsets is None else offsets.flatten(1), group)


def _dense(dtype: torch.dtype) -> Callable[[Tensor], Dense]:
    return lambda raw: Dense(raw.view(dtype).flatten(-2))


def _q4_0(raw: Tensor) -> Grouped:
    """d, 16 bytes of nibbles; w = (code - 8) d"""
    d = _half(raw[..., :2])
    return _grouped(_nibbles(raw[..., 2:]), d, -8.0 * d, 32)


def _q4_1(raw: Tensor) -> Grouped:
    """d, m, 16 bytes of nibbles; w = code d + m"""
    return _grouped(_nibbles(raw[..., 4:]), _half(raw[..., :2]), _half(raw[..., 2:4]), 32)


def _q8_0(raw: Tensor) -> Grouped:
    """d, 32 signed bytes; w = code d"""
    return _grouped(raw[..., 2:].contiguous().view(torch.int8), _half(raw[..., :2]), None, 32)


def _q5_0(raw: Tensor) -> Grouped:
    """d, 32 fifth bits, 16 bytes of nibbles; w = (code - 16) d"""
    return _grouped(_fifth_bits(raw[..., 2:6], raw[..., 6:]) - 16, _half(raw[..., :2]), None, 32)


def _q5_1(raw: Tensor) -> Grouped:
    """d, m, 32 fifth bits, 16 bytes of nibbles; w = code d + m"""
    return _grouped(_fifth_bits(raw[..., 4:8], raw[..., 8:]), _half(raw[..., :2]), _half(raw[..., 2:4]), 32)


def _fifth_bits(bits: Tensor, nibbles: Tensor) -> Tensor:
    """[..., 4] with one bit per code and [..., 16] with two codes per byte -> [..., 32] int8"""
    high = (bits[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1  # [..., 4, 8]
    return (_nibbles(nibbles).flatten(-2) | (high.flatten(-2) << 4)).view(torch.int8)


def _q4_k(raw: Tensor) -> Grouped:
    """d, dmin, 12 bytes of scales, 4 x 32 bytes of nibbles; w = code d scale - dmin min"""
    codes = _nibbles(raw[..., 16:].unflatten(-1, (4, 32)))  # [N, blocks, 4, 2, 32]
    return _grouped(codes, *_k_scales(raw), 32)


def _q5_k(raw: Tensor) -> Grouped:
    """d, dmin, 12 bytes of scales, 32 bytes with a fifth bit for each of 8 groups, nibbles as above; w as above"""
    codes = _nibbles(raw[..., 48:].unflatten(-1, (4, 32))).flatten(-3, -2)  # [N, blocks, 8, 32]
    high = (raw[..., 16:48].unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    return _grouped((codes | (high << 4)).view(torch.int8), *_k_scales(raw), 32)


def _k_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets [N, blocks, 8] from d, dmin and 8 pairs of 6-bit (scale, min) in 12 bytes."""
    d, dmin = _half(raw[..., :2]), _half(raw[..., 2:4])
    low, high, mixed = raw[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)  # [N, blocks, 4] each
    scales = torch.cat((low & 63, (mixed & 15) | (low >> 6 << 4)), dim=-1)
    mins = torch.cat((high & 63, (mixed >> 4) | (high >> 6 << 4)), dim=-1)
    return d * scales.float(), -(dmin * mins.float())


def _q6_k(raw: Tensor) -> Grouped:
    """128 bytes of low nibbles, 64 of high bit pairs, 16 signed scales, d; w = (code - 32) d scale"""
    low = _nibbles(raw[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (2, 32)).flatten(-3, -2)  # [.., 2, 4, 32]
    pairs = raw[..., 128:192].unflatten(-1, (2, 32))
    high = torch.stack([(pairs >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-2)  # [N, blocks, 2, 4, 32]
    codes = (low | (high << 4)).to(torch.int8) - 32
    scales = raw[..., 192:208].contiguous().view(torch.int8).float()
    return _grouped(codes, _half(raw[..., 208:]) * scales, None, 16)


def _q2_k(raw: Tensor) -> Grouped:
    """16 bytes of 4-bit (scale, min), 64 bytes of bit pairs, d, dmin; w = code d scale - dmin min"""
    pairs = raw[..., 16:80].unflatten(-1, (2, 32))
    codes = torch.stack([(pairs >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-2)  # [N, blocks, 2, 4, 32]
    scales, mins = (raw[..., :16] & 15).float(), (raw[..., :16] >> 4).float()
    return _grouped(codes, _half(raw[..., 80:82]) * scales, -(_half(raw[..., 82:84]) * mins), 16)


def _from_library(name: str, unit: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensor], Grouped]:
    """A type whose values are whole multiples of `unit`, [blocks, bytes] uint8 -> [blocks, groups] float32."""

    def unpack(raw: Tensor) -> Grouped:
        try:
            from gguf import GGMLQuantizationType
            from gguf.quants import dequantize
        except ImportError:
            raise UnsupportedModel(
                f"tensors of the type {name} are read by the package gguf: pip install gguf, or use a file with {USABLE}"
            ) from None
        blocks = raw.flatten(0, -2).numpy()
        units = unit(blocks).astype(np.float32)
        values = dequantize(blocks, GGMLQuantizationType[name]).reshape(*units.shape, -1)  # [blocks, groups, inputs]
        width = min(values.shape[-1], _LARGEST_GROUP)
        values = values.reshape(len(blocks), -1, width)
        units = units.repeat(values.shape[1] // units.shape[1], axis=1)
        codes = np.rint(values / np.where(units == 0, 1, units)[..., None]).astype(np.int8)
        shape = raw.shape[:-1]
        return _grouped(
            torch.from_numpy(codes).unflatten(0, shape), torch.from_numpy(units).unflatten(0, shape), None, width
        )

    return unpack


_LARGEST_GROUP = 32


def _f16(blocks: np.ndarray, start: int) -> np.ndarray:
    """[blocks, 1] float32"""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _words(blocks: np.ndarray, start: int, stop: int, kind: type[np.unsignedinteger]) -> np.ndarray:
    return blocks[:, start:stop].copy().view(kind)


def _halves(octets: np.ndarray) -> np.ndarray:
    """[blocks, n] -> [blocks, 2 n]: low and high half of every byte."""
    return np.stack((octets & 15, octets >> 4), -1).reshape(len(octets), -1)


def _unit_q3_k(blocks: np.ndarray) -> np.ndarray:
    low = np.concatenate((blocks[:, 96:104] & 15, blocks[:, 96:104] >> 4), 1)
    high = np.concatenate([(blocks[:, 104:108] >> shift) & 3 for shift in (0, 2, 4, 6)], 1)
    return _f16(blocks, 108) * ((low | high << 4).astype(np.int8) - 32)


def _unit_iq1_s(blocks: np.ndarray) -> np.ndarray:
    return _f16(blocks, 0) * (2 * (_words(blocks, 34, 50, np.uint16) >> 12 & 7) + 1) / 8


def _unit_iq1_m(blocks: np.ndarray) -> np.ndarray:
    words = _words(blocks, 48, 56, np.uint16)  # [blocks, 4]: four scales of 3 bits, and a quarter of d
    quarters = words >> 12 << np.array([0, 4, 8, 12], np.uint16)
    d = np.bitwise_or.reduce(quarters, axis=1, keepdims=True).astype(np.uint16).view(np.float16).astype(np.float32)
    scales = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(blocks), -1)
    return d * (2 * scales + 1) / 8


def _unit_iq4_xs(blocks: np.ndarray) -> np.ndarray:
    high = _words(blocks, 2, 4, np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    return _f16(blocks, 0) * ((_halves(blocks[:, 4:8]) | high << 4).astype(np.int8) - 32)


_UNITS: dict[str, tuple[int, int, Callable[[np.ndarray], np.ndarray]]] = {
    "Q3_K": (256, 110, _unit_q3_k),
    "IQ1_S": (256, 50, _unit_iq1_s),
    "IQ1_M": (256, 56, _unit_iq1_m),
    "IQ2_XXS": (256, 66, lambda b: _f16(b, 0) * (0.5 + (_words(b, 2, 66, np.uint32)[:, 1::2] >> 28)) / 4),
    "IQ2_XS": (256, 74, lambda b: _f16(b, 0) * (0.5 + _halves(b[:, 66:])) / 4),
    "IQ2_S": (256, 82, lambda b: _f16(b, 0) * (0.5 + _halves(b[:, 74:])) / 4),
    "IQ3_XXS": (256, 98, lambda b: _f16(b, 0) * (0.5 + (_words(b, 66, 98, np.uint32) >> 28)) / 2),
    "IQ3_S": (256, 110, lambda b: _f16(b, 0) * (1 + 2 * _halves(b[:, 106:]))),
    "IQ4_NL": (32, 18, lambda b: _f16(b, 0)),
    "IQ4_XS": (256, 136, _unit_iq4_xs),
    "TQ1_0": (256, 54, lambda b: _f16(b, 52)),
    "TQ2_0": (256, 66, lambda b: _f16(b, 64)),
}
"""Inputs and bytes of a block, and the step between its values, of the types that the package `gguf` reads."""


@dataclass(frozen=True, slots=True)
class BlockType:
    block: int
    block_bytes: int
    unpack: Callable[[Tensor], Weight]


TYPES = {
    "F32": BlockType(1, 4, _dense(torch.float32)),
    "F16": BlockType(1, 2, _dense(torch.float16)),
    "BF16": BlockType(1, 2, _dense(torch.bfloat16)),
    "Q4_0": BlockType(32, 18, _q4_0),
    "Q4_1": BlockType(32, 20, _q4_1),
    "Q5_0": BlockType(32, 22, _q5_0),
    "Q5_1": BlockType(32, 24, _q5_1),
    "Q8_0": BlockType(32, 34, _q8_0),
    "Q4_K": BlockType(256, 144, _q4_k),
    "Q5_K": BlockType(256, 176, _q5_k),
    "Q6_K": BlockType(256, 210, _q6_k),
    "Q2_K": BlockType(256, 84, _q2_k),
} | {name: BlockType(block, size, _from_library(name, unit)) for name, (block, size, unit) in _UNITS.items()}


def block_type(kind: int) -> BlockType:
    name = type_name(kind)
    if name not in TYPES:
        raise UnsupportedModel(f"GGUF tensor type {name} is not supported; supported: {', '.join(TYPES)}")
    return TYPES[name]

"""Weights in the order in which the native kernels read them: tiles of 32 outputs, with inputs outermost in a tile.

4-bit codes: [N/32, K/8, 32] words of inputs 8i to 8i + 7; byte b holds input b in its low half and 4 + b in its high half.
8-bit codes: [N/32, K/4, 32, 4] bytes. Other types: [N/32, K, 32] elements in their type, which the kernels widen exactly.
Scales and offsets: [N/32, K/group, 32], float16 if that is exact (Q4_0, Q4_1, Q8_0), otherwise float32. N and K are padded
to 32 with zeros.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.kernels.formats.weights import GROUPS, Grouped, Weight

TILE = 32
_FORMATS = {torch.uint8: 0, torch.int8: 1, torch.float16: 2, torch.bfloat16: 3, torch.float32: 4}
_CODES = (torch.uint8, torch.int8)


class _Header(ctypes.Structure):
    """`weight_t` in cpu/weight.h."""

    _fields_ = (
        ("num_outputs", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("format", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("has_half_scales", ctypes.c_int64),
        ("rounds_activations", ctypes.c_int64),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class PackedForm:
    """Description of a packed weight, without its tensors."""

    outputs: int
    inputs: int
    format: int
    """Number of the code type in `_FORMATS`."""
    group: int
    has_half_scales: bool
    rounds_activations: bool
    """Whether products round activations to int8; only with codes."""

    def shapes(self) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        """Types and shapes of codes, scales and offsets. A weight may lack the last one or two."""
        dtype = next((dtype for dtype, number in _FORMATS.items() if number == self.format), None)
        is_valid = self.group in GROUPS and min(self.outputs, self.inputs) >= 1
        if dtype is None or not is_valid or (self.rounds_activations and dtype not in _CODES):
            raise ValueError(f"{self} does not describe a packed weight")
        tiles, inputs = -(-self.outputs // TILE), -(-self.inputs // TILE) * TILE
        codes: tuple[int, ...] = (tiles, inputs, TILE)
        if dtype in _CODES:
            codes = (tiles, inputs // (8 if dtype is torch.uint8 else 4), TILE, 4)
        scales = (torch.float16 if self.has_half_scales else torch.float32, (tiles, inputs // self.group, TILE))
        return ((dtype, codes), scales, scales)


class PackedWeight:
    """Read-only. `address` is the argument of native functions; it is valid while this object exists."""

    __slots__ = ("_header", "address", "form", "shape", "tensors")

    def __init__(self, weight: Weight) -> None:
        if isinstance(weight, Grouped):
            codes, group, is_half = weight.codes, weight.group, _is_half(weight.scales) and _is_half(weight.offsets)
            scales = _scale_tiles(weight.scales, group, is_half)
            offsets, rounds = _scale_tiles(weight.offsets, group, is_half), weight.activations == "int8"
        else:
            codes, group, is_half, scales, offsets, rounds = weight.values, TILE, False, None, None, False
        packed = {torch.uint8: _nibbles, torch.int8: _quads}.get(codes.dtype, _elements)(codes)
        tensors = tuple(tensor for tensor in (packed, scales, offsets) if tensor is not None)
        self._set(PackedForm(*weight.shape, _FORMATS[codes.dtype], group, is_half, rounds), tensors)

    @classmethod
    def of(cls, form: PackedForm, tensors: Sequence[Tensor]) -> "PackedWeight":
        """A weight from the `form` and `tensors` of another. Raises ValueError for tensors of other types or shapes,
        beyond which native code would read."""
        expected = form.shapes()[: len(tensors)]
        if not tensors or expected != tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors):
            raise ValueError(f"tensors {[(t.dtype, tuple(t.shape)) for t in tensors]} do not match {form}")
        weight = cls.__new__(cls)
        weight._set(form, tuple(tensor.contiguous() for tensor in tensors))
        return weight

    def _set(self, form: PackedForm, tensors: tuple[Tensor, ...]) -> None:
        self.form, self.tensors, self.shape = form, tensors, (form.outputs, form.inputs)
        addresses = [tensor.data_ptr() for tensor in tensors] + [None] * (3 - len(tensors))
        self._header = _Header(
            form.outputs,
            form.inputs,
            form.format,
            form.group,
            form.has_half_scales,
            form.rounds_activations,
            *addresses,
        )
        self.address = ctypes.addressof(self._header)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def _is_half(values: Tensor | None) -> bool:
    return values is None or torch.equal(values.half().float(), values)


def _scale_tiles(values: Tensor | None, group: int, is_half: bool) -> Tensor | None:
    if values is None:
        return None
    return _tiles(values.half() if is_half else values, TILE // group)


def _padded(values: Tensor, multiple: int) -> Tensor:
    outputs, columns = values.shape
    return pad(values, (0, -columns % multiple, 0, -outputs % TILE))


def _tiles(values: Tensor, multiple: int) -> Tensor:
    """[N, C] to [N/32, C, 32], C padded to a multiple of `multiple`."""
    return _padded(values, multiple).unflatten(0, (-1, TILE)).transpose(1, 2).contiguous()


def _elements(values: Tensor) -> Tensor:
    return _tiles(values, TILE)


def _quads(codes: Tensor) -> Tensor:
    """[N, K] int8 to [N/32, K/4, 32, 4]."""
    tiles = _padded(codes, TILE).unflatten(0, (-1, TILE)).unflatten(2, (-1, 4))  # [N/32, 32, K/4, 4]
    return tiles.transpose(1, 2).contiguous()


def _nibbles(codes: Tensor) -> Tensor:
    """[N, K] codes 0..15 to [N/32, K/8, 32, 4] bytes: inputs 0 to 3 of eight in low halves, 4 to 7 in high halves."""
    tiles = _padded(codes, TILE).unflatten(0, (-1, TILE)).unflatten(2, (-1, 8))  # [N/32, 32, K/8, 8]
    pairs = tiles[..., :4] | tiles[..., 4:] << 4
    return pairs.transpose(1, 2).contiguous()

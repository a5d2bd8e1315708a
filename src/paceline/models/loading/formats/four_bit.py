"""4-bit weights in safetensors folders: w = (code - zero) * scale, with one scale and zero per group of inputs.

    awq                 X.qweight [K, N/8] and X.qzeros [K/G, N/8]: eight outputs per word, in the order 0 2 4 6 1 3 5 7
    gptq                X.qweight [K/8, N]: eight inputs per word; X.qzeros [K/G, N/8]: eight outputs per word, stored as
                        zero - 1 unless the format is gptq_v2; X.g_idx, the group of each input
    compressed-tensors  X.weight_packed [N, K/8] and X.weight_scale [N, K/G]; X.weight_zero_point [N/8, K/G], without it 8

AWQ and GPTQ have X.scales [K/G, N]. The first code of a word is in its lowest bits. The matrix that results has codes of 4 bits
and an offset -zero * scale per group: no value is rounded.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.weights import FourBit, Grouped, Weight
from paceline.models.loading.formats.family_weights import StoredWeights
from paceline.models.loading.prequantized import FourBitScheme

_CODES = {"awq": "qweight", "gptq": "qweight", "compressed-tensors": "weight_packed"}
_PER_WORD = 8
_GROUP = 32
"""Inputs per scale of the resulting matrix, which divides the groups of a file."""
_AWQ_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
"""Place in a word of each of eight outputs."""
_SYMMETRIC_ZERO = 8


class FourBitWeights:
    """Weights of a folder with 4-bit matrices. Matrices that are not quantised are read as they are."""

    def __init__(self, stored: StoredWeights, scheme: FourBitScheme) -> None:
        self._stored, self._scheme = stored, scheme
        self._suffix = _CODES[scheme.method]
        self._names = stored.names()

    def names(self) -> frozenset[str]:
        """Names as if no matrix were quantised."""
        return frozenset(self._logical_names())

    def _logical_names(self) -> Iterator[str]:
        parts = ("qzeros", "scales", "g_idx", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
        for name in self._names:
            stem, _, last = name.rpartition(".")
            if last == self._suffix:
                yield f"{stem}.weight"
            elif last not in parts:
                yield name

    def shape(self, name: str) -> tuple[int, ...]:
        stem = self._quantized(name)
        if stem is None:
            return self._stored.shape(name)
        found = self._stored.shape(f"{stem}{self._suffix}")
        if len(found) != 2:
            raise UnsupportedModel(f"{stem}{self._suffix} has the shape {found}: expected a matrix")
        first, second = found
        if self._scheme.method == "awq":
            return second * _PER_WORD, first
        return (second, first * _PER_WORD) if self._scheme.method == "gptq" else (first, second * _PER_WORD)

    def tensor(self, name: str, index: int | None = None) -> Tensor:
        return self._stored.tensor(name, index)

    def vector(self, name: str) -> Tensor:
        return self._stored.vector(name)

    def matrix(self, name: str) -> Weight:
        stem = self._quantized(name)
        if stem is None:
            return self._stored.matrix(name)
        codes, scales, zeros = {"awq": self._awq, "gptq": self._gptq}.get(self._scheme.method, self._packed)(stem)
        outputs, inputs = self.shape(name)
        return _grouped(name, codes[:outputs, :inputs], scales, zeros[:outputs])

    def _quantized(self, name: str) -> str | None:
        """The stem of a quantised matrix; None for other weights."""
        stem = name.removesuffix("weight")
        return stem if name.endswith(".weight") and stem + self._suffix in self._names else None

    def _awq(self, stem: str) -> tuple[Tensor, Tensor, Tensor]:
        codes, zeros = (
            _unpack(self._stored.tensor(stem + part)).unflatten(1, (-1, _PER_WORD))[:, :, _AWQ_ORDER].flatten(1).t()
            for part in ("qweight", "qzeros")
        )
        return codes, self._stored.tensor(stem + "scales").t(), zeros.float()

    def _gptq(self, stem: str) -> tuple[Tensor, Tensor, Tensor]:
        codes = _unpack(self._stored.tensor(stem + "qweight").t())
        scales = self._stored.tensor(stem + "scales").t()
        zeros = _unpack(self._stored.tensor(stem + "qzeros")).t().float() + self._scheme.zero_offset
        self._check_order(stem + "g_idx", codes.shape[1], scales.shape[1])
        return codes, scales, zeros

    def _packed(self, stem: str) -> tuple[Tensor, Tensor, Tensor]:
        codes = _unpack(self._stored.tensor(stem + "weight_packed"))
        scales = self._stored.tensor(stem + "weight_scale")
        zeros = torch.full(scales.shape, float(_SYMMETRIC_ZERO))
        if stem + "weight_zero_point" in self._names:
            zeros = _unpack(self._stored.tensor(stem + "weight_zero_point").t()).t().float()
        self._check_order(stem + "weight_g_idx", codes.shape[1], scales.shape[1])
        return codes, scales, zeros

    def _check_order(self, name: str, inputs: int, groups: int) -> None:
        """Raise `UnsupportedModel` if the groups are not consecutive inputs."""
        if name not in self._names:
            return
        order = self._stored.tensor(name).long()
        if not torch.equal(order, torch.arange(inputs) // -(-inputs // groups)):
            raise UnsupportedModel(
                f"{name} assigns inputs to groups in another order (desc_act, actorder): use a checkpoint without it"
            )


def _unpack(words: Tensor) -> Tensor:
    """[A, B] int32 -> [A, 8 B] uint8, the lowest bits first."""
    if words.dtype is not torch.int32 or words.dim() != 2:
        raise UnsupportedModel(f"packed codes are {words.dtype} {tuple(words.shape)}: expected a matrix of int32")
    octets = words.contiguous().view(torch.uint8)  # [A, 4 B], little-endian
    return torch.stack((octets & 15, octets >> 4), -1).flatten(1)


def _grouped(name: str, codes: Tensor, scales: Tensor, zeros: Tensor) -> Grouped:
    (outputs, inputs), groups = codes.shape, scales.shape[1]
    if inputs % groups or inputs // groups % _GROUP or scales.shape != (outputs, groups) or zeros.shape != scales.shape:
        raise UnsupportedModel(
            f"{name} has {tuple(codes.shape)} codes, {tuple(scales.shape)} scales and {tuple(zeros.shape)} zeros: "
            f"groups must be multiples of {_GROUP} inputs"
        )
    dtype, width, scales = scales.dtype, inputs // groups, scales.float()
    repeats = width // _GROUP
    scales, offsets = (values.repeat_interleave(repeats, 1).contiguous() for values in (scales, -zeros * scales))
    if dtype not in (torch.float16, torch.bfloat16):
        return Grouped(codes.contiguous(), scales, offsets, _GROUP)
    return FourBit(codes.contiguous(), scales, offsets, _GROUP, stored_group=width, scale_dtype=dtype)

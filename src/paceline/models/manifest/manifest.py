"""Manifest of the weights that a worker exports: the model's configuration, and shapes, types and a checksum of every part.

Weights are transferred as they are in memory: fused, packed for the kernels, quantised. Two workers with the same `form` can
use each other's bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.cpu import native
from paceline.kernels.formats.four_bit import FourBitForm, FourBitWeight
from paceline.kernels.formats.linear import DenseWeight
from paceline.kernels.formats.packing import PackedForm, PackedWeight
from paceline.kernels.formats.quantized import Quantization, QuantizedWeight
from paceline.kernels.formats.weights import Activations
from paceline.model_files.tokenizer import Tokenizer
from paceline.models.decoder import DecoderModel
from paceline.models.device import side_stream
from paceline.models.families.spec import DecoderSpec
from paceline.models.families.spec_json import spec_from_json, spec_to_json
from paceline.models.manifest.parts import Parts, Piece, part_of, tokenizer_to_tensor
from paceline.models.memory import memory_checksum

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn
    )
}  # fmt: skip
MAX_PART_BYTES = 1 << 36
ALIGNMENT = 64
_NEEDED = {0: ("tokenizer",), 1: ("embedding", "final_norm")}
"""Required pieces of the parts other than layers."""


@dataclass(frozen=True, slots=True)
class TensorForm:
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = DTYPES[self.dtype].itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class PieceForm:
    """A weight, or the tokenizer."""

    name: str
    kind: Literal["packed", "dense", "quantized", "four_bit", "vector"]
    tensors: tuple[TensorForm, ...]
    packed: PackedForm | None = None
    four_bit: FourBitForm | None = None


@dataclass(frozen=True, slots=True)
class PartForm:
    pieces: tuple[PieceForm, ...]
    sum: str
    """`memory_checksum` of its tensors, in order."""

    @property
    def tensors(self) -> list[TensorForm]:
        return [tensor for piece in self.pieces for tensor in piece.tensors]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Manifest:
    name: str
    """Name of the model, for messages."""
    form: str
    """Memory format of the weights: `weight_form`."""
    fingerprint: str
    """Checksum of the checkpoint: `quick_checksum`."""
    config: str
    """Configuration of the model: `spec_to_json`."""
    parts: tuple[PartForm, ...]
    """Parts in the order of `Parts`."""

    def check(self) -> None:
        """Raise `UnsupportedModel` unless the manifest describes a model. It may come from any peer."""
        config = spec_from_json(self.config)
        parts = Parts.of(config)
        if len(self.parts) != parts.count:
            raise UnsupportedModel(f"the manifest lists {len(self.parts)} parts, and the model has {parts.count}")
        for i, part in enumerate(self.parts):
            shapes = [size for tensor in part.tensors for size in tensor.shape]
            if any(tensor.dtype not in DTYPES for tensor in part.tensors) or min(shapes, default=0) < 0:
                raise UnsupportedModel(f"the manifest lists the {parts.name(i)} with invalid types or shapes")
            needed = config.matrix_names(parts.layer_number(i)) if parts.is_layer(i) else _NEEDED[i]
            missing = set(needed) - {piece.name for piece in part.pieces}
            if missing:
                raise UnsupportedModel(f"the manifest lists the {parts.name(i)} without {', '.join(sorted(missing))}")
            if part.nbytes > MAX_PART_BYTES:
                raise UnsupportedModel(
                    f"the manifest lists the {parts.name(i)} with {part.nbytes} bytes, more than {MAX_PART_BYTES}"
                )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices, as `DecoderModel.weight_bytes`."""
        pieces = (piece for part in self.parts for piece in part.pieces if piece.kind != "vector")
        return sum(tensor.nbytes for piece in pieces for tensor in piece.tensors)


class ExportedModel(Protocol):
    """A loaded model, as `ExportedWeights` needs it."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> DecoderSpec: ...

    @property
    def model(self) -> DecoderModel: ...

    @property
    def tokenizer(self) -> Tokenizer: ...


class ExportedWeights:
    """Weights of a complete model, for other workers to copy. Read-only."""

    def __init__(self, loaded: ExportedModel, form: str, fingerprint: str, manifest: Manifest | None = None) -> None:
        """`manifest` is the one that the model was loaded with, if its checksums matched. If None, it is computed on demand."""
        assert loaded.model.is_complete
        self._loaded, self._form, self._fingerprint = loaded, form, fingerprint
        self._loaded_manifest = manifest
        self._parts = Parts.of(loaded.config)

    @property
    def device(self) -> torch.device:
        """Device of the tensors that stay in memory as they are; the CPU if they are made on demand."""
        return self._loaded.model.device

    def tensors(self, part: int) -> list[Tensor]:
        """Tensors of a part in the order of the manifest, on the device of the model."""
        return [tensor for piece in self._pieces(part).values() for tensor in piece_tensors(piece)]

    @cached_property
    def manifest(self) -> Manifest:
        """Manifest of all parts. The first call reads all weights."""
        if self._loaded_manifest is not None:
            return self._loaded_manifest
        loaded = self._loaded
        with side_stream(self.device):
            parts = tuple(self._part(part) for part in range(self._parts.count))
        return Manifest(loaded.name, self._form, self._fingerprint, spec_to_json(loaded.config), parts)

    def _part(self, part: int) -> PartForm:
        pieces = self._pieces(part)
        forms = tuple(piece_form(name, piece) for name, piece in pieces.items())
        return PartForm(forms, memory_checksum(self.tensors(part)))

    def _pieces(self, part: int) -> dict[str, Piece]:
        return self._tokenizer if part == self._parts.tokenizer else part_of(self._loaded.model, part)

    @cached_property
    def _tokenizer(self) -> dict[str, Piece]:
        return {"tokenizer": tokenizer_to_tensor(self._loaded.tokenizer)}


def weight_form(
    device: torch.device, dtype: torch.dtype, quantization: Quantization | None, activations: Activations = "int8"
) -> str:
    """Memory format of the weights of a model loaded with these options."""
    packed = device.type == "cpu" and dtype is torch.float32 and native.available()
    kind = f"packed for {activations}" if packed else "plain"
    return f"{kind} {str(dtype).removeprefix('torch.')} {quantization or 'as stored'}"


def piece_form(name: str, piece: Piece) -> PieceForm:
    tensors = tuple(
        TensorForm(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in piece_tensors(piece)
    )
    if isinstance(piece, PackedWeight):
        return PieceForm(name, "packed", tensors, piece.form)
    if isinstance(piece, FourBitWeight):
        return PieceForm(name, "four_bit", tensors, four_bit=piece.form)
    if isinstance(piece, Tensor):
        return PieceForm(name, "vector", tensors)
    return PieceForm(name, "dense" if isinstance(piece, DenseWeight) else "quantized", tensors)


def piece_tensors(piece: Piece) -> tuple[Tensor, ...]:
    if isinstance(piece, PackedWeight):
        return piece.tensors
    if isinstance(piece, QuantizedWeight):
        return piece.values, piece.scales
    if isinstance(piece, FourBitWeight):
        return piece.codes, piece.words
    return (piece if isinstance(piece, Tensor) else piece.values,)


def empty_part(part: PartForm) -> list[Tensor]:
    """Host memory to receive a part."""
    return [_aligned(tensor.nbytes).view(DTYPES[tensor.dtype]).view(tensor.shape) for tensor in part.tensors]


def _aligned(num_bytes: int) -> Tensor:
    """Memory aligned as torch's. numpy asks for huge pages, so that there are fewer page faults."""
    data = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -data.ctypes.data % ALIGNMENT
    return torch.from_numpy(data[start : start + num_bytes])


def assemble(part: PartForm, tensors: Sequence[Tensor], device: torch.device) -> dict[str, Piece]:
    """The weights in `tensors`, by name. Raises ValueError if types and shapes are inconsistent."""
    pieces: dict[str, Piece] = {}
    rest = iter([tensor.to(device) for tensor in tensors])
    for form in part.pieces:
        own = [next(rest) for _ in form.tensors]
        if form.kind == "packed" and form.packed is not None:
            pieces[form.name] = PackedWeight.of(form.packed, own)
        elif form.kind == "quantized" and len(own) == 2:
            pieces[form.name] = QuantizedWeight(own[0], own[1])
        elif form.kind == "four_bit" and form.four_bit is not None and len(own) == 2:
            shape = form.four_bit.outputs, form.four_bit.inputs
            pieces[form.name] = FourBitWeight(own[0], own[1], shape, form.four_bit.group, form.four_bit.kind)
        elif form.kind == "dense" and len(own) == 1 and own[0].dim() == 2:
            pieces[form.name] = DenseWeight(own[0])
        elif form.kind == "vector" and len(own) == 1:
            pieces[form.name] = own[0]
        else:
            raise ValueError(f"{form} does not describe a weight")
    return pieces


def check_replaceable(current: DecoderModel, other: DecoderModel) -> None:
    """Raise `UnsupportedModel` with the first difference, unless the two models have the same configuration, and all weights
    the same form in memory."""
    different = [
        f.name for f in fields(current.config) if getattr(current.config, f.name) != getattr(other.config, f.name)
    ]
    if different:
        raise _cannot_replace(f"the models differ in their {', '.join(different)}")
    parts = Parts.of(current.config)
    for part in range(1, parts.count):
        pieces = part_of(other, part)
        for name, piece in part_of(current, part).items():
            mine, its = piece_form(name, piece), piece_form(name, pieces[name])
            if mine != its:
                raise _cannot_replace(
                    f"the {name} of the {parts.name(part)} is {_shape(mine)}, that of the new weights {_shape(its)}"
                )


def _shape(form: PieceForm) -> str:
    return f"{form.kind} {', '.join(f'{tensor.dtype} {list(tensor.shape)}' for tensor in form.tensors)}"


def _cannot_replace(reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{reason}: weights are replaced by those of the same architecture and format; restart the server with the new model"
    )


@torch.inference_mode()
def replace_weights(current: DecoderModel, other: DecoderModel) -> None:
    """Give `current` the values of `other`, in place: captured CUDA graphs and models that share layers read these tensors.
    The models have passed `check_replaceable`. The copies run in the current stream."""
    for part in range(1, Parts.of(current.config).count):
        pieces = part_of(other, part)
        for name, piece in part_of(current, part).items():
            for mine, its in zip(piece_tensors(piece), piece_tensors(pieces[name]), strict=True):
                mine.copy_(its)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, without a copy."""
    if not tensor.numel():
        return memoryview(bytearray())
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # it is a buffer

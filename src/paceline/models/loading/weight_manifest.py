"""What a worker says of the weights it holds: shapes, types and a checksum of every part, and the model they make.

Weights travel as they are held: fused, packed for the kernels, quantised. `form` says how that is, and two workers whose forms
are the same word can use each other's bytes.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.cpu import native
from paceline.kernels.linear import DenseWeight
from paceline.kernels.packing import PackedForm, PackedWeight
from paceline.kernels.quantized import Quantization, QuantizedWeight
from paceline.models.architectures.config import ModelConfig
from paceline.models.architectures.rope import FrequencyFactors, LinearScaling, Llama3Scaling
from paceline.models.loading.weight_parts import MATRICES, Parts, Piece

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.float8_e4m3fn
    )
}  # fmt: skip
MAX_PART_BYTES = 1 << 36
_NEEDED = {0: ("tokenizer",), 1: ("embedding", "final_norm")}
"""Of the parts that are no layers."""
_SCALINGS = {kind.__name__: kind for kind in (LinearScaling, Llama3Scaling, FrequencyFactors)}


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
    kind: Literal["packed", "dense", "quantized", "vector"]
    tensors: tuple[TensorForm, ...]
    packed: PackedForm | None = None


@dataclass(frozen=True, slots=True)
class PartForm:
    pieces: tuple[PieceForm, ...]
    sum: str
    """sha256 over the bytes of all its tensors, one after the other."""

    @property
    def tensors(self) -> list[TensorForm]:
        return [tensor for piece in self.pieces for tensor in piece.tensors]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Manifest:
    name: str
    """Of the model, for people."""
    form: str
    fingerprint: str
    """Of the checkpoint they were read from: `checkpoint_sum`."""
    config: str
    """`config_to_json`."""
    parts: tuple[PartForm, ...]
    """In the order of `Parts`."""

    def check(self) -> None:
        """Raise for what would not be a model, whoever wrote it."""
        parts = Parts.of(config_from_json(self.config))
        if len(self.parts) != parts.count:
            raise UnsupportedModel(f"{len(self.parts)} parts are listed, and the model has {parts.count}")
        for i, part in enumerate(self.parts):
            shapes = [size for tensor in part.tensors for size in tensor.shape]
            if any(tensor.dtype not in DTYPES for tensor in part.tensors) or min(shapes, default=0) < 0:
                raise UnsupportedModel(f"the {parts.name(i)} is listed with types or shapes that there are not")
            missing = set(_NEEDED.get(i, MATRICES)) - {piece.name for piece in part.pieces}
            if missing:
                raise UnsupportedModel(f"the {parts.name(i)} is listed without {', '.join(sorted(missing))}")
            if part.nbytes > MAX_PART_BYTES:
                raise UnsupportedModel(f"the {parts.name(i)} is listed with {part.nbytes} bytes")

    @property
    def weight_bytes(self) -> int:
        """Of all matrices: `DecoderModel.weight_bytes`."""
        pieces = (piece for part in self.parts for piece in part.pieces if piece.kind != "vector")
        return sum(tensor.nbytes for piece in pieces for tensor in piece.tensors)


def weight_form(device: torch.device, dtype: torch.dtype, quantization: Quantization | None) -> str:
    """How a model loaded like this holds its weights."""
    packed = device.type == "cpu" and dtype is torch.float32 and native.available()
    return f"{'packed' if packed else 'plain'} {str(dtype).removeprefix('torch.')} {quantization or 'as stored'}"


def piece_form(name: str, piece: Piece) -> PieceForm:
    tensors = tuple(TensorForm(str(one.dtype).removeprefix("torch."), tuple(one.shape)) for one in piece_tensors(piece))
    if isinstance(piece, PackedWeight):
        return PieceForm(name, "packed", tensors, piece.form)
    if isinstance(piece, Tensor):
        return PieceForm(name, "vector", tensors)
    return PieceForm(name, "dense" if isinstance(piece, DenseWeight) else "quantized", tensors)


def piece_tensors(piece: Piece) -> tuple[Tensor, ...]:
    if isinstance(piece, PackedWeight):
        return piece.tensors
    if isinstance(piece, QuantizedWeight):
        return piece.values, piece.scales
    return (piece if isinstance(piece, Tensor) else piece.values,)


def blank(part: PartForm, pinned: bool) -> list[Tensor]:
    """Memory for a part on its way. `pinned`: a GPU will copy it."""
    return [
        torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], pin_memory=pinned and tensor.nbytes > 0)
        for tensor in part.tensors
    ]


def assemble(part: PartForm, tensors: Sequence[Tensor], device: torch.device) -> dict[str, Piece]:
    """The weights that were blank memory. Raises ValueError where shapes do not go together."""
    pieces: dict[str, Piece] = {}
    rest = iter([tensor.to(device) for tensor in tensors])
    for form in part.pieces:
        own = [next(rest) for _ in form.tensors]
        if form.kind == "packed" and form.packed is not None:
            pieces[form.name] = PackedWeight.of(form.packed, own)
        elif form.kind == "quantized" and len(own) == 2:
            pieces[form.name] = QuantizedWeight(own[0], own[1])
        elif form.kind == "dense" and len(own) == 1 and own[0].dim() == 2:
            pieces[form.name] = DenseWeight(own[0])
        elif form.kind == "vector" and len(own) == 1:
            pieces[form.name] = own[0]
        else:
            raise ValueError(f"{form} is no weight")
    return pieces


def host_bytes(tensor: Tensor) -> memoryview:
    """All bytes of a contiguous tensor on the host, without a copy."""
    if not tensor.numel():
        return memoryview(bytearray())
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # it is a buffer


def part_sum(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(host_bytes(tensor.cpu()))
    return digest.hexdigest()


def config_to_json(config: ModelConfig) -> str:
    values = asdict(config)
    if config.rope_scaling is not None:
        values["rope_scaling"]["kind"] = type(config.rope_scaling).__name__
    return json.dumps(values)


def config_from_json(text: str) -> ModelConfig:
    try:
        values = json.loads(text)
        scaling: Mapping[str, object] | None = values.pop("rope_scaling")
        if scaling is not None:
            given = {name: tuple(one) if isinstance(one, list) else one for name, one in scaling.items()}
            values["rope_scaling"] = _SCALINGS[str(given.pop("kind"))](**given)  # type: ignore[arg-type]
        values["eos_ids"] = tuple(values["eos_ids"])
        return ModelConfig(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnsupportedModel(f"no shape of a model: {error!r}") from None

"""Weights in a file of `torch.save`, the form of early public draft heads. Nothing in such a file is executed.

`torch.load(weights_only=True)` builds containers and tensors alone and refuses every other object. The tensors are mapped, so
that a file is not read before its values are.
"""

import zipfile
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.weights import Dense, Weight

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Types of the weights of a draft."""


class PickledWeights:
    """`Weights` over the tensors of a pickle."""

    def __init__(self, path: Path) -> None:
        self.files = (path,)
        self._tensors = _read(path)

    @property
    def file_bytes(self) -> int:
        return self.files[0].stat().st_size

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensor(name).shape)

    def is_float(self, name: str) -> bool:
        return self.tensor(name).dtype in FLOATS

    def matrix(self, name: str) -> Weight:
        return Dense(self.tensor(name).contiguous())

    def vector(self, name: str) -> Tensor:
        return self.tensor(name).float()

    def tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise UnsupportedModel(f"{self.files[0]} has no weight {name}")
        return self._tensors[name]


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with zipfile.ZipFile(path) as archive:
            is_packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise UnsupportedModel(
            f"{path} is not a whole file of torch.save ({error!s:.80}): download it again, or save it as model.safetensors"
        ) from None
    if is_packed:  # a small file could unpack to any size
        raise UnsupportedModel(f"{path} is compressed, which torch.save never does: save it as model.safetensors")
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # the reader of pickles raises errors of many types for malformed bytes
        raise UnsupportedModel(
            f"{path} holds other objects than tensors, or is damaged, and nothing in it was executed: use a file of tensors"
        ) from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) and _is_stored(tensor) for name, tensor in tensors.items()
    ):
        raise UnsupportedModel(f"{path} is not a dictionary of names and tensors: save the `state_dict` of the head")
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _is_stored(tensor: Tensor) -> bool:
    """Whether the file has every value, which an expanded tensor does not."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()

"""A Hugging Face folder as a checkpoint: config.json, one or many safetensors files, tokenizer files."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.weights import Dense, Weight
from paceline.models.architectures.config import ModelConfig
from paceline.models.loading.checkpoint import Checkpoint
from paceline.models.loading.formats.family_weights import family_weights
from paceline.models.loading.formats.four_bit import FourBitWeights
from paceline.models.loading.prequantized import DTYPES, SCALES, four_bit_scheme, with_scales
from paceline.models.loading.weight_shapes import check_weights
from paceline.models.metadata import Metadata, read_json
from paceline.models.tokenizer.tokenizer import tokenizer_from_folder

_PACKED_GROWTH = 2.2
"""Loaded bytes per byte of a file with 4-bit codes, at most: MXFP4 becomes 8-bit codes, groups get more scales."""
_MAX_NAME = 200
"""Characters of a file name."""


def open_folder(folder: Path) -> Checkpoint:
    if not (folder / "config.json").is_file():
        raise UnsupportedModel(
            f"{folder} has no config.json: give a folder saved by `save_pretrained`, or a .gguf file"
        )
    values = read_json(folder / "config.json")
    config, scheme = ModelConfig.from_hf(values), four_bit_scheme(Metadata("config.json", values))
    stored = FolderWeights(folder)
    weights = family_weights(config, stored if scheme is None else FourBitWeights(stored, scheme))
    check_weights(config, weights.shape)
    is_packed = scheme is not None or any(name.endswith("_blocks") for name in stored.names())
    growth = _PACKED_GROWTH if is_packed else 1.0
    tokenizer = partial(tokenizer_from_folder, folder)
    return Checkpoint(folder.name, config, weights, tokenizer, stored.files, growth, is_packed)


class FolderWeights:
    """`Weights` over the safetensors files of a folder, memory mapped."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[Path, safe_open] = {}
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.is_file():
            shards = _weight_map(index)
            missing = sorted({shard for shard in shards.values() if not (folder / shard).is_file()})
            if missing:
                raise UnsupportedModel(f"{folder} lacks {', '.join(missing)}: download the model again")
            self._shards = {name: folder / shard for name, shard in shards.items()}
        elif single.is_file():
            self._shards = dict.fromkeys(self._file(single).keys(), single)
        else:
            raise UnsupportedModel(
                f"{folder} has no model.safetensors, and pickled weights are not supported: save with `safe_serialization=True`"
            )

    @property
    def file_bytes(self) -> int:
        """Bytes of the files with these weights. A folder may have further files with the same weights in another layout."""
        return sum(path.stat().st_size for path in self.files)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted(set(self._shards.values())))

    def names(self) -> frozenset[str]:
        return frozenset(self._shards)

    def shape(self, name: str) -> tuple[int, ...]:
        with _readable(self._path(name)):
            return tuple(self._file(self._path(name)).get_slice(name).get_shape())

    def matrix(self, name: str) -> Weight:
        values = self.tensor(name)
        if values.dtype in DTYPES:
            stem = name.removesuffix("weight")
            scale = next((stem + suffix for suffix in SCALES if stem + suffix in self._shards), None)
            if scale is None:
                raise UnsupportedModel(f"{name} is {values.dtype} and has no {' or '.join(SCALES)}")
            return with_scales(name, values, self.tensor(scale))
        if values.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UnsupportedModel(
                f"{name} is {values.dtype}; supported: float32, float16, bfloat16, and int8 or float8_e4m3fn with scales"
            )
        if values.dim() != 2:
            raise UnsupportedModel(f"{name} has the shape {tuple(values.shape)}: expected a matrix")
        return Dense(values)

    def vector(self, name: str) -> Tensor:
        return self.tensor(name).float()

    def tensor(self, name: str, index: int | None = None) -> Tensor:
        """A tensor as it is stored, or its part `index` along the first dimension."""
        with _readable(self._path(name)):
            file = self._file(self._path(name))
            return file.get_tensor(name) if index is None else file.get_slice(name)[index]

    def _path(self, name: str) -> Path:
        if name not in self._shards:
            raise UnsupportedModel(f"the checkpoint has no weight {name}")
        return self._shards[name]

    def _file(self, path: Path) -> safe_open:
        if path not in self._files:
            with _readable(path):
                self._files[path] = safe_open(path, "pt")
        return self._files[path]


def _weight_map(index: Path) -> dict[str, str]:
    """{weight: file name}. A name with a folder in it could be any file of this machine."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise UnsupportedModel(f"{index} has no weight_map from names to files: download it again")
    for shard in set(shards.values()):
        if Path(shard).name != shard or "\0" in shard or len(shard) > _MAX_NAME:
            raise UnsupportedModel(
                f"{index} names the file {shard[:80]!r}, which is not in the folder: download it again"
            )
    return shards


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Errors of the safetensors library about the file's contents become `UnsupportedModel`."""
    try:
        yield
    except (SafetensorError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise UnsupportedModel(
            f"{path} is not a readable safetensors file ({error!s:.200}): download it again"
        ) from None

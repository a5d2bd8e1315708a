"""A Hugging Face folder as a checkpoint: config.json, one or many safetensors files, tokenizer files.

`FourBitWeights` reads 4-bit weights in such folders: w = (code - zero) * scale, with one scale and zero per group of inputs.

    awq                 X.qweight [K, N/8] and X.qzeros [K/G, N/8]: eight outputs per word, in the order 0 2 4 6 1 3 5 7
    gptq                X.qweight [K/8, N]: eight inputs per word; X.qzeros [K/G, N/8]: eight outputs per word, stored as
                        zero - 1 unless the format is gptq_v2; X.g_idx, the group of each input
    compressed-tensors  X.weight_packed [N, K/8] and X.weight_scale [N, K/G]; X.weight_zero_point [N/8, K/G], without it 8

AWQ and GPTQ have X.scales [K/G, N]. The first code of a word is in its lowest bits. The matrix that results has codes of 4 bits
and an offset -zero * scale per group: no value is rounded.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.weights import Dense, FourBit, Grouped, Weight
from paceline.model_files import Metadata, read_json
from paceline.model_files.tokenizer import tokenizer_from_folder
from paceline.models.families.prequantized import DTYPES, SCALES, FourBitScheme, four_bit_scheme, with_scales
from paceline.models.families.read import read_config, text_config
from paceline.models.weights.checkpoint import Checkpoint
from paceline.models.weights.family_weights import StoredWeights, family_weights
from paceline.models.weights.shapes import check_weights

logger = logging.getLogger(__name__)

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


_PACKED_GROWTH = 2.2
"""Loaded bytes per byte of a file with 4-bit codes, at most: MXFP4 becomes 8-bit codes, groups get more scales."""
_MAX_HEADER_BYTES, _MAX_TENSORS = 32 << 20, 1 << 17
"""Of a safetensors file; those of the largest models have a thousand tensors, with experts one by one some ten thousand."""
_MAX_NAME = 200
"""Characters of a file name."""
_FLOATS = ("F32", "F16", "BF16")


def open_folder(folder: Path) -> Checkpoint:
    if not (folder / "config.json").is_file():
        raise UnsupportedModel(
            f"{folder} has no config.json: give a folder saved by `save_pretrained`, or a .gguf file"
        )
    values = read_json(folder / "config.json")
    config, scheme = read_config(values), four_bit_scheme(Metadata("config.json", values))
    stored = FolderWeights(folder)
    if text_config(values) is not None:
        logger.info("%s has a model for text and images: only its text part is loaded", folder)
        config = replace(config, tie_embeddings="lm_head.weight" not in stored.names())
    weights = family_weights(config, stored if scheme is None else FourBitWeights(stored, scheme))
    check_weights(config, weights.shape)
    is_packed = scheme is not None or any(name.endswith("_blocks") for name in stored.names())
    growth = _PACKED_GROWTH if is_packed else 1.0
    tokenizer = partial(tokenizer_from_folder, folder)
    return Checkpoint(folder.name, config, weights, tokenizer, stored.files, growth, is_packed)


class FolderWeights:
    """`Weights` over the safetensors files of a folder, memory mapped."""

    def __init__(self, folder: Path, name: str = "model.safetensors") -> None:
        self._files: dict[Path, safe_open] = {}
        index, single = folder / f"{name}.index.json", folder / name
        if index.is_file():
            shards = _weight_map(index)
            missing = sorted({shard for shard in shards.values() if not (folder / shard).is_file()})
            if missing:
                raise UnsupportedModel(f"{folder} lacks {', '.join(missing)}: download the model again")
            stored = {name: folder / shard for name, shard in shards.items()}
        elif single.is_file():
            stored = dict.fromkeys(self._file(single).keys(), single)
        else:
            raise UnsupportedModel(
                f"{folder} has no model.safetensors, and pickled weights are not supported: save with `safe_serialization=True`"
            )
        self._stored_names = _text_names(stored)
        self._shards = {name: stored[stored_name] for name, stored_name in self._stored_names.items()}

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
            return tuple(self._file(self._path(name)).get_slice(self._stored_names[name]).get_shape())

    def is_float(self, name: str) -> bool:
        """Whether the values are float32, float16 or bfloat16."""
        with _readable(self._path(name)):
            return self._file(self._path(name)).get_slice(self._stored_names[name]).get_dtype() in _FLOATS

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
            file, stored = self._file(self._path(name)), self._stored_names[name]
            return file.get_tensor(stored) if index is None else file.get_slice(stored)[index]

    def _path(self, name: str) -> Path:
        if name not in self._shards:
            raise UnsupportedModel(f"the checkpoint has no weight {name}")
        return self._shards[name]

    def _file(self, path: Path) -> safe_open:
        if path not in self._files:
            _check_header(path)
            with _readable(path):
                self._files[path] = safe_open(path, "pt")
        return self._files[path]


_TEXT_PARTS = (
    (("model.", "model.language_model."), ("lm_head.", "lm_head.")),
    (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
)
"""Beginnings of names in models for text and images, as (name of the text part, stored name)."""


def _text_names(stored: Iterable[str]) -> dict[str, str]:
    """{name: stored name} of the weights of the text part, which are all weights of most models."""
    for prefixes in _TEXT_PARTS:
        if any(name.startswith(prefixes[0][1]) for name in stored):
            return {
                prefix + name.removeprefix(there): name
                for name in stored
                for prefix, there in prefixes
                if name.startswith(there)
            }
    return {name: name for name in stored}


def _weight_map(index: Path) -> dict[str, str]:
    """{weight: file name}. A name with a folder in it could be any file of this machine."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise UnsupportedModel(f"{index} has no weight_map from names to files: download it again")
    if len(shards) > _MAX_TENSORS:
        raise UnsupportedModel(f"{index} has {len(shards)} tensors; at most {_MAX_TENSORS}")
    for shard in set(shards.values()):
        if Path(shard).name != shard or "\0" in shard or len(shard) > _MAX_NAME:
            raise UnsupportedModel(
                f"{index} names the file {shard[:80]!r}, which is not in the folder: download it again"
            )
    return shards


def _check_header(path: Path) -> None:
    """Raises `UnsupportedModel` for a header with more tensors than a model has, which takes long to read."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _MAX_HEADER_BYTES:
            raise UnsupportedModel(f"the header of {path} has {size} bytes; at most {_MAX_HEADER_BYTES}")
        num_tensors = file.read(size).count(b'"data_offsets"')
    if num_tensors > _MAX_TENSORS:
        raise UnsupportedModel(f"{path} has {num_tensors} tensors; at most {_MAX_TENSORS}")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Errors of the safetensors library about the file's contents become `UnsupportedModel`."""
    try:
        yield
    except (SafetensorError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise UnsupportedModel(
            f"{path} is not a readable safetensors file ({error!s:.200}): download it again"
        ) from None

"""Values of model files, checked for type and range before use: config.json, GGUF metadata, tokenizer files.

A wrong value ends in `UnsupportedModel`, which names the file and the key. The module imports without torch.

`GGUFReader` reads the header of a GGUF file: metadata, and type, shape and offset of each tensor. The reference reader creates
an array object per token of the vocabulary, which takes seconds; this reader takes about a tenth of a second for 100,000
strings. It supports little-endian files of version 2 and 3.
"""

import json
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import UnsupportedModel

if TYPE_CHECKING:
    import numpy as np

MAX_JSON_BYTES = 32 << 20
"""Largest JSON file; the index of a model with 100,000 tensors has 10 MB."""
MAX_TOKEN_ID = 1 << 20
"""Tokens of a vocabulary at most; the largest in use have 262,144 to 901,629."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path} is not JSON ({error}): download it again") from None
    if not isinstance(values, dict):
        raise UnsupportedModel(f"{path} must contain a JSON object, not {type(values).__name__}: download it again")
    return values


def read_text(path: Path) -> str:
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise UnsupportedModel(f"{path} has {size} bytes; a file of its kind has at most {MAX_JSON_BYTES}")
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UnsupportedModel(f"{path} is not UTF-8 ({error}): download it again") from None


class Metadata:
    """Typed access to the values of one file. A null counts as absent, and an absent value without a default is an error."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self._source, self._values = source, values

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        return self._values.get(name)

    def count(self, name: str, most: int, default: int | None = None, least: int = 1) -> int:
        """A whole number from `least` to `most`."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._error(name, value, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, least: float, most: float, default: float | None = None) -> float:
        value = self._get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:
            raise self._error(name, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._error(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._error(name, value, "text")
        return value

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if name in self else None

    def section(self, name: str) -> "Metadata":
        """The object under a key; empty if it is absent."""
        value = self._values.get(name)
        if value is None:
            return Metadata(f"{self._source}, {name}", {})
        if not isinstance(value, Mapping):
            raise self._error(name, value, "an object")
        return Metadata(f"{self._source}, {name}", value)

    def sections(self) -> Iterator["Metadata"]:
        return (self.section(name) for name in self._values)

    def array(self, name: str, kind: type | tuple[type, ...], length: int | None = None) -> list[Any]:
        """A list of `kind`, of `length` items if that is given."""
        value = self._get(name, None)
        if not isinstance(value, list) or not all(issubclass(item_type, kind) for item_type in set(map(type, value))):
            raise self._error(name, value, "a list of one type")
        if length is not None and len(value) != length:
            raise UnsupportedModel(f"{self._source} has {len(value)} items in {name}, expected {length}")
        return value

    def token_id(self, name: str) -> int | None:
        """A token id; None if the key is absent."""
        return self.count(name, MAX_TOKEN_ID, least=0) if name in self else None

    def token_ids(self, name: str) -> tuple[int, ...]:
        """The ids of a number or a list of numbers."""
        value = self._values.get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        return tuple(Metadata(self._source, {name: number}).count(name, MAX_TOKEN_ID, least=0) for number in values)

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise UnsupportedModel(f"{self._source} has no {name}: download the model again")
        return value

    def _error(self, name: str, value: object, expected: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._source} has {name}={_shown(value)}: expected {expected}")


def _shown(value: object) -> str:
    """`repr` of a value; a large one is cut before it is written."""
    if isinstance(value, str):
        value = value[:60]
    elif isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    elif isinstance(value, list | dict | tuple):
        return f"a {type(value).__name__} of {len(value)} items"
    return repr(value)


_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

# Limits of a header. The largest published vocabularies have 262,144 tokens and as many merges, and headers of 20 MB.
_MAX_FIELDS, _MAX_TENSORS, _MAX_ITEMS, _MAX_HEADER_BYTES = 1 << 16, 1 << 17, 1 << 22, 64 << 20
_MAX_DIMS, _MAX_ALIGNMENT = 4, 1 << 16


@dataclass(frozen=True, slots=True)
class TensorInfo:
    shape: tuple[int, ...]
    """Shape, rows first: [N, K]."""
    type: int
    offset: int
    """Offset from the start of the file."""


class GGUFReader:
    """`metadata` has Python values, `tensors` maps names, `bytes_at` returns contents."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            if path.stat().st_size < 8:
                raise self._malformed("is shorter than a header")
            # NOTE: copy-on-write, because torch warns about read-only memory. It is never written.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._end = min(len(self._map), _MAX_HEADER_BYTES)
        self._at, self._num_items = 0, 0
        try:
            self._read_header()
        except struct.error:
            raise self._malformed("ends in the middle of its header") from None

    def bytes_at(self, offset: int, count: int) -> "np.ndarray":
        """[count] uint8, a view of the file."""
        import numpy as np  # the header is read without it

        if offset + count > len(self._map):
            raise self._malformed("is shorter than its header states")
        return np.frombuffer(self._map, np.uint8, count, offset)

    def _read_header(self) -> None:
        magic, version = self._map[:4], struct.unpack_from("<I", self._map, 4)[0]
        if magic != b"GGUF" or version not in (2, 3):
            raise UnsupportedModel(f"{self._path} is not a little-endian GGUF file of version 2 or 3")
        self._at = 8
        num_tensors, num_fields = self._scalar("Q"), self._scalar("Q")
        if num_tensors > _MAX_TENSORS or num_fields > _MAX_FIELDS:
            raise self._malformed(f"declares {num_tensors} tensors and {num_fields} fields")
        self.metadata: dict[str, Any] = {self._string(): self._value(self._scalar("I")) for _ in range(num_fields)}
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = Metadata("the GGUF header", self.metadata).count("general.alignment", _MAX_ALIGNMENT, 32)
        start = math.ceil(self._at / alignment) * alignment
        self.tensors = {name: TensorInfo(shape, kind, start + offset) for name, shape, kind, offset in infos}
        if len(self.metadata) != num_fields or len(self.tensors) != num_tensors:
            raise self._malformed("repeats the name of a field or of a tensor")

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._string(), self._scalar("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._malformed(f"has a tensor of {num_dims} dimensions")
        dims = tuple(self._scalar("Q") for _ in range(num_dims))
        if 0 in dims or math.prod(dims) >> 48:
            raise self._malformed(f"has a tensor of the shape {dims[::-1]}")
        return name, dims[::-1], self._scalar("I"), self._scalar("Q")

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._map, self._at)
        self._skip(struct.calcsize(f"<{code}"))
        return value

    def _skip(self, count: int) -> int:
        """Moves over `count` bytes of the header and returns where they start."""
        start, self._at = self._at, self._at + count
        if self._at > self._end:
            raise self._malformed("declares more metadata than it has, or more than 64 MiB")
        return start

    def _string(self) -> str:
        start = self._skip(self._scalar("Q"))
        return self._map[start : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(self._code(kind))
        item, count = self._scalar("I"), self._scalar("Q")
        self._num_items += count
        if self._num_items > _MAX_ITEMS:
            raise self._malformed(f"has arrays of more than {_MAX_ITEMS} items")
        if item == _STRING:
            return self._strings(count)
        code = f"<{count}{self._code(item)}"  # no known key has an array of arrays
        start = self._skip(struct.calcsize(code))
        return list(struct.unpack_from(code, self._map, start))

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self._malformed(f"has a value of the unknown type {kind}")
        return _SCALARS[kind]

    def _strings(self, count: int) -> list[str]:
        """Hot loop: a vocabulary and its merges have several hundred thousand strings."""
        data, at, last, strings = self._map, self._at, self._end, []
        for _ in range(count):
            end = at + 8 + int.from_bytes(data[at : at + 8], "little")
            if end > last:
                break
            strings.append(data[at + 8 : end].decode("utf-8", "replace"))
            at = end
        self._skip(end - self._at if count else 0)
        return strings

    def _malformed(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._path} {what}: download it again")

"""Values of model files, checked for type and range before use: config.json, GGUF metadata, tokenizer files.

A wrong value ends in `UnsupportedModel`, which names the file and the key. Imports without torch.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import UnsupportedModel

MAX_JSON_BYTES = 32 << 20
"""Largest JSON file; the index of a model with 100,000 tensors has 10 MB."""
MAX_TOKEN_ID = 1 << 24


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

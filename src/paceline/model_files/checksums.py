"""What a model's files say of it as a whole: checksums of its weights, its context length, and the sampling that its authors
recommend.

Recommended sampling parameters hold for requests that set none.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from paceline.core.errors import InvalidRequest, PacelineError, UnsupportedModel
from paceline.core.request import SamplingParams
from paceline.model_files.hub import EMBEDDED, PREFIX, Inflation, find_checkpoint, find_model, gguf_parts
from paceline.model_files.metadata import GGUFReader, read_json

THREADS = 4
SAMPLES, PAGE = 128, 4096
"""Number and bytes of the samples that `quick_checksum` reads of a file. They are evenly spread, so that a changed region of
0.8% of the file is detected."""
HEAD_BYTES = 1 << 16
MAX_HEADER_BYTES = 100 << 20
MAX_TENSORS = 4096
"""Most tensors of a safetensors file of which the beginning is read, too."""


def weights_checksum(name_or_path: str | Path) -> str:
    """sha256 in hex. For a single file, the checksum of the file; for several, of their sorted names and checksums, with
    config.json. Reads all bytes: about a second per gigabyte."""
    if str(name_or_path).startswith(PREFIX):  # its name determines how it is generated from its base
        base = weights_checksum(Inflation.parse(str(name_or_path)).base)
        return hashlib.sha256(f"{name_or_path}\n{base}\n".encode()).hexdigest()
    path = find_model(name_or_path)
    files = _weight_files(path)
    if len(files) == 1 and (path.is_file() or files[0].suffix == ".gguf"):
        return _checksums(files)[0]
    files += [file for file in (path / "config.json",) if file.is_file()]
    lines = "".join(f"{file.name} {checksum}\n" for file, checksum in zip(files, _checksums(files), strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def quick_checksum(name_or_path: str | Path) -> str:
    """sha256 in hex of sizes, headers and samples of the files, and of config.json. The samples have the beginning of every
    tensor of a safetensors file. It distinguishes checkpoints of any size in milliseconds and does not detect every changed
    byte. File names do not count: they differ between machines."""
    if str(name_or_path).startswith(PREFIX):
        name = str(name_or_path)
        base = Inflation.parse(name).base
        return hashlib.sha256(f"{name.replace(str(base), '')}\n{quick_checksum(base)}\n".encode()).hexdigest()
    path = find_model(name_or_path)
    digest = hashlib.sha256()
    for file in _weight_files(path):
        _sample(file, digest.update)
    config = path / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    return digest.hexdigest()


def _sample(path: Path, update: Callable[[bytes], None]) -> None:
    """Pass the size, the first bytes and the samples of a file to `update`."""
    size = path.stat().st_size
    update(f"{size}\n".encode())
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # without it each read may read hundreds of kilobytes ahead
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        update(file.read(HEAD_BYTES))
        starts = [i * max(0, size - PAGE) // (SAMPLES - 1) // PAGE * PAGE for i in range(SAMPLES)]
        if path.suffix == ".safetensors":
            starts += _tensor_starts(file, size)
        for start in starts:
            file.seek(start)
            update(file.read(PAGE))


def _tensor_starts(file: BinaryIO, size: int) -> list[int]:
    """Where the tensors of a safetensors file begin. None of a malformed header, which its reader refuses."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if length > min(size, MAX_HEADER_BYTES):
        return []
    try:
        tensors = json.loads(file.read(length))
        starts = sorted(
            8 + length + entry["data_offsets"][0] for name, entry in tensors.items() if name != "__metadata__"
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, OverflowError):
        return []
    return [start for start in starts if isinstance(start, int) and 0 <= start < size][
        :: max(1, -(-len(starts) // MAX_TENSORS))
    ]


def _weight_files(path: Path) -> list[Path]:
    files = gguf_parts(path) if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.gguf")])
    if not files:
        raise UnsupportedModel(f"{path} has no .safetensors or .gguf files to compute a checksum of")
    return files


def _checksums(files: Sequence[Path]) -> list[str]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(_checksum, files))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def context_length(model: str) -> int | None:
    """Tokens for which the model was made, as its files say. None if they do not."""
    if model.startswith(PREFIX):
        return None
    try:
        path = find_checkpoint(model)
        if path.is_file():
            values = GGUFReader(path).metadata
            length = values.get(f"{values.get('general.architecture')}.context_length")
        else:
            config = read_json(path / "config.json")
            length = {**config, **(config.get("text_config") or {})}.get("max_position_embeddings")
    except (PacelineError, OSError, TypeError):
        return None
    return length if isinstance(length, int) else None


FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
CARDS: dict[str, dict[str, float]] = {EMBEDDED: {"temperature": 0.2, "top_p": 0.9}}
"""Recommendations of models whose files have none."""
MAX_BYTES = 2**20


def recommended_sampling(model: str) -> dict[str, float]:
    """Fields of `SamplingParams` from the model's generation_config.json, or from our card of it; empty if there are none.
    Values that `SamplingParams` does not allow are left out."""
    if model.startswith(PREFIX):
        model = Inflation.parse(model).base
    if model in CARDS:
        return dict(CARDS[model])
    return {name: value for name, value in _read(model).items() if name in FIELDS and _is_valid(name, value)}


def _read(model: str) -> dict[str, Any]:
    try:
        path = find_model(model)
        file = (path if path.is_dir() else path.parent) / "generation_config.json"
        if not file.is_file() or file.stat().st_size > MAX_BYTES:
            return {}
        values = json.loads(Path(file).read_text("utf-8"))
    except (PacelineError, OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _is_valid(name: str, value: Any) -> bool:
    try:
        SamplingParams(**{name: value})
    except (InvalidRequest, TypeError):
        return False
    return not isinstance(value, bool)

"""A checksum of a model's weights, from the files they are in."""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paceline.core.errors import UnsupportedModel
from paceline.models.architectures.inflation import PREFIX, Inflation
from paceline.models.loading.hub import find_model

THREADS = 4
SAMPLES, PAGE = 128, 4096
"""What `checkpoint_sum` looks at of a file, evenly spread: nothing of more than 0.8% of it is missed."""
HEAD_BYTES = 1 << 16


def weights_sum(name_or_path: str | Path) -> str:
    """sha256 in hex. Of a single file it is the file's own; of several, over the sorted names and sums of all of them and of
    config.json. Reads everything: about a second a gigabyte."""
    if str(name_or_path).startswith(PREFIX):  # made from a base by a rule that its name spells out
        base = weights_sum(Inflation.parse(str(name_or_path)).base)
        return hashlib.sha256(f"{name_or_path}\n{base}\n".encode()).hexdigest()
    path = find_model(name_or_path)
    files = _weight_files(path)
    if path.is_file() or (len(files) == 1 and files[0].suffix == ".gguf"):
        return _sums(files)[0]
    files += [one for one in (path / "config.json",) if one.is_file()]
    lines = "".join(f"{file.name} {one}\n" for file, one in zip(files, _sums(files), strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def checkpoint_sum(name_or_path: str | Path) -> str:
    """sha256 in hex that tells checkpoints apart in milliseconds, however large: of sizes, headers and samples of the files,
    and of config.json. Not of their names, which differ from machine to machine; no proof that nobody changed a byte."""
    if str(name_or_path).startswith(PREFIX):
        what = str(name_or_path)
        base = Inflation.parse(what).base
        return hashlib.sha256(f"{what.replace(str(base), '')}\n{checkpoint_sum(base)}\n".encode()).hexdigest()
    path = find_model(name_or_path)
    digest = hashlib.sha256()
    for file in _weight_files(path):
        _sample(file, digest.update)
    config = path / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    return digest.hexdigest()


def _sample(path: Path, take: Callable[[bytes], None]) -> None:
    size = path.stat().st_size
    take(f"{size}\n".encode())
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # else each look may read some hundred kilobytes ahead
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        take(file.read(HEAD_BYTES))
        for i in range(SAMPLES):
            file.seek(i * max(0, size - PAGE) // (SAMPLES - 1) // PAGE * PAGE)
            take(file.read(PAGE))


def _weight_files(path: Path) -> list[Path]:
    files = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.gguf")])
    if not files:
        raise UnsupportedModel(f"{path} holds no weights to take a checksum of")
    return files


def _sums(files: Sequence[Path]) -> list[str]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(_sum, files))


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

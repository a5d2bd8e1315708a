"""A checksum of a model's weights, from the files they are in."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paceline.core.errors import UnsupportedModel
from paceline.models.hub import find_model
from paceline.models.inflate import PREFIX, Inflation

THREADS = 4


def weights_sum(name_or_path: str | Path) -> str:
    """sha256 in hex. Of a single file it is the file's own; of several, over the sorted names and sums of all of them and of
    config.json. Reads everything: about a second a gigabyte."""
    if str(name_or_path).startswith(PREFIX):  # made from a base by a rule that its name spells out
        base = weights_sum(Inflation.parse(str(name_or_path)).base)
        return hashlib.sha256(f"{name_or_path}\n{base}\n".encode()).hexdigest()
    path = find_model(name_or_path)
    files = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.gguf")])
    if not files:
        raise UnsupportedModel(f"{path} holds no weights to take a checksum of")
    if path.is_file() or (len(files) == 1 and files[0].suffix == ".gguf"):
        return _sums(files)[0]
    files += [one for one in (path / "config.json",) if one.is_file()]
    lines = "".join(f"{file.name} {one}\n" for file, one in zip(files, _sums(files), strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def _sums(files: Sequence[Path]) -> list[str]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(_sum, files))


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

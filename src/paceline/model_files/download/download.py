"""Downloads a model from a hub into the Hugging Face cache, where other programs find it too.

A file is written as `NAME.incomplete`, so that an interrupted download continues, and gets its name when its checksum is right.
The hub is that of HF_ENDPOINT, huggingface.co by default; HF_TOKEN is the key of gated models.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from paceline.core.errors import MissingDependency, PacelineError, UnsupportedModel
from paceline.model_files.hub import Repository, find_model

HUB = "https://huggingface.co"
PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q5_K_M", "Q6_K", "Q8_0", "BF16", "F16")
"""Quantisations of GGUF files, the first one that a repository has is taken if none is named."""
FOLDER_FILES = re.compile(r"[^/]+\.(json|jinja|safetensors)|tokenizer\.model|merges\.txt|vocab\.txt")
"""Files of a checkpoint that is a folder."""
CHUNK_BYTES = 1 << 22

Advance = Callable[[str, int, int], None]
"""Receives the name of a file, the bytes that are here, and its size."""


class DownloadFailed(PacelineError):
    """A model could not be downloaded. The message says whether the same command continues."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    name: str
    size: int
    sha256: str | None
    """None for a small file, which has a Git id."""
    blob: str
    """Its name in the cache: the SHA-256, or the Git id."""


def pull(name: str, advance: Advance) -> Path:
    """The file or the folder of a model by its id, `USER/REPO` or `hf.co/USER/REPO:Q4_K_M`. Downloads what is not here."""
    repository = Repository.parse(name)
    if repository is None:
        raise UnsupportedModel(f"{name!r} is no id of a model: give USER/REPO, or USER/REPO:Q4_K_M for a GGUF file")
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise MissingDependency("huggingface_hub", f"downloading {repository.id}", "hub") from None
    hub = os.environ.get("HF_ENDPOINT", HUB).rstrip("/")
    with _errors_of(repository, hub):
        info = HfApi(endpoint=hub).model_info(repository.id, files_metadata=True, timeout=10.0)
        commit = str(info.sha)
        files = {
            sibling.rfilename: RemoteFile(
                sibling.rfilename,
                sibling.size or 0,
                sibling.lfs.sha256 if sibling.lfs else None,
                sibling.lfs.sha256 if sibling.lfs else str(sibling.blob_id),
            )
            for sibling in info.siblings or ()
        }
        for chosen in choose_files(repository, sorted(files)):
            _fetch(repository, files[chosen], commit, hub, advance)
        _replace(repository.folder / "refs" / "main", commit)
    return find_model(name)


def choose_files(repository: Repository, names: Sequence[str]) -> list[str]:
    """The files that a model consists of: a GGUF file with all of its parts, or a checkpoint in the format of transformers."""
    folder = [name for name in names if FOLDER_FILES.fullmatch(name)]
    has_weights = any(name.endswith(".safetensors") for name in folder)
    if has_weights and repository.quantization is None:
        is_doubled = any(name.startswith("model") and name.endswith(".safetensors") for name in folder)
        return [name for name in folder if not (is_doubled and name.startswith("consolidated"))]
    variants = gguf_variants(names)
    if not variants:
        raise UnsupportedModel(f"{repository.id} has no GGUF file{'' if has_weights else ' and no safetensors'}")
    wanted = [repository.quantization] if repository.quantization else [*PREFERRED, ""]
    found = next((stem for kind in wanted for stem in variants if _has_kind(stem, kind)), None)
    if found is None:
        raise UnsupportedModel(
            f"{repository.id} has no file for {repository.quantization!r}: there are "
            + ", ".join(stem.rpartition("/")[2] for stem in variants)
        )
    return variants[found]


def gguf_variants(names: Sequence[str]) -> dict[str, list[str]]:
    """The GGUF files of a repository by their names without `.gguf` and part numbers. Projectors of images are left out."""
    variants: dict[str, list[str]] = {}
    for name in names:
        if name.endswith(".gguf") and "mmproj" not in name:
            variants.setdefault(re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", name), []).append(name)
    return variants


def _has_kind(stem: str, kind: str) -> bool:
    return not kind or re.search(rf"(^|[-._/]){re.escape(kind)}$", stem, re.IGNORECASE) is not None


def _fetch(repository: Repository, file: RemoteFile, commit: str, hub: str, advance: Advance) -> None:
    """Bring one file into the cache."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, disable_progress_bars

    blob = repository.folder / "blobs" / file.blob
    pointer = repository.folder / "snapshots" / commit / file.name
    if not blob.is_file():
        blob.parent.mkdir(parents=True, exist_ok=True)
        partial = blob.with_name(f"{blob.name}.incomplete")
        disable_progress_bars()
        with partial.open("ab") as target:
            here = target.tell()
            if here < file.size:
                counted = _Counted(target, lambda size: advance(file.name, size, file.size))
                url = hf_hub_url(repository.id, file.name, revision=commit, endpoint=hub)
                http_get(url, counted, resume_size=here, headers=build_hf_headers(), expected_size=file.size)  # type: ignore[arg-type]
        advance(file.name, file.size, file.size)
        _check(partial, file)
        partial.replace(blob)
    pointer.parent.mkdir(parents=True, exist_ok=True)
    if not pointer.exists():
        pointer.unlink(missing_ok=True)
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))


class _Counted:
    """A file that reports its size whenever it grows."""

    def __init__(self, file: IO[bytes], report: Callable[[int], None]) -> None:
        self._file, self._report = file, report

    def write(self, data: bytes) -> int:
        written = self._file.write(data)
        self._report(self._file.tell())
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _check(partial: Path, file: RemoteFile) -> None:
    """Raise `DownloadFailed` and delete the file if its checksum is wrong."""
    digest = (
        hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % partial.stat().st_size, usedforsecurity=False)
    )
    with partial.open("rb") as content:
        while chunk := content.read(CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != file.blob:
        partial.unlink()
        raise DownloadFailed(
            f"{file.name} has the checksum {digest.hexdigest()} and not {file.blob}: it was deleted; download it again"
        )


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


@contextmanager
def _errors_of(repository: Repository, hub: str) -> Iterator[None]:
    """Errors of the hub's library as `DownloadFailed`, with what to do."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    page = f"{hub}/{repository.id}"
    failures: tuple[Any, ...] = (OSError, *HfHubHTTPError.__bases__)  # the second is that of its HTTP library
    token = "set HF_TOKEN to a token of your account, or run `hf auth login`"
    try:
        yield
    except GatedRepoError:
        raise DownloadFailed(f"{repository.id} is gated: accept its terms at {page}, then {token}") from None
    except RepositoryNotFoundError:
        raise DownloadFailed(
            f"there is no {repository.id} at {hub}, or it is private: check the name at {hub}/models?search="
            f"{repository.id.partition('/')[2]}, or {token}"
        ) from None
    except failures as error:
        if isinstance(error, PacelineError):
            raise
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise DownloadFailed(f"{hub} refuses {repository.id} with status {status}: {token}") from None
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DownloadFailed(
            f"the download of {repository.id} from {hub} stopped ({reason[:200]}): the same command continues"
        ) from None

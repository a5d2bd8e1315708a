"""Files of trained drafts, each in a folder whose other files are well-formed.

An input of `eagle_weights` is the beginning of the file: the weights of the well-formed one follow it. An input of
`pickled_medusa` is the pickle in the file, which names the tensors; their values are those of the well-formed file.
"""

import io
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.models.drafts.load import load_draft, open_draft_folder
from paceline.models.loading.load import LoadedModel
from tests import public_heads
from tests.fuzz.mutations import mutate_bytes, mutate_json
from tests.fuzz.target import FuzzTarget
from tests.models.drafts.test_load import loaded_target, save

folder = Path(tempfile.mkdtemp(prefix="paceline-fuzz-"))
for kind in ("eagle", "medusa", "distilled"):
    save(folder / kind, kind, reduced=20)
target = loaded_target()
seven_layers = public_heads.target()
target_of_public = LoadedModel("tiny", seven_layers.config, seven_layers, target.tokenizer)
for name, public in (("speculators",) * 2, ("sglang",) * 2, ("medusa",) * 2, ("dspark", "speculators dspark")):
    public_heads.PUBLIC_HEADS[public]().save(folder / "public" / name)


def fuzz_file(path: Path, tail: bytes = b"", target: LoadedModel = target) -> Callable[[bytes], bool]:
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


def fuzz_pickle(data: bytes) -> bool:
    """Loads the pickled heads with another pickle in their file."""
    path = folder / "public/medusa/medusa_lm_head.pt"
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, contents in entries.items():
            archive.writestr(name, data if name.endswith("/data.pkl") else contents)
    return fuzz_file(path, target=target_of_public)(packed.getvalue())


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
    **{
        name: FuzzTarget(fuzz_file(folder / "public" / name / "config.json", target=target_of_public), mutate_json)
        for name in ("speculators", "sglang", "dspark")
    },
    "pickled_medusa": FuzzTarget(fuzz_pickle, mutate_bytes, 1 << 14),
    "eagle_weights": FuzzTarget(fuzz_file(WEIGHTS, weights_of(WEIGHTS)), mutate_bytes),
}

"""Copies the package `paceline-smollm2` to a folder, with the model and the drafts, ready for `pip wheel`."""

import shutil
import sys
from pathlib import Path

from paceline.model_files.hub.hub import EMBEDDED
from paceline.model_files.hub.hub import find_model
from paceline.model_files.hub.hub import shipped_drafts

INIT = '"""SmolLM2-135M-Instruct as a GGUF file, and drafts for it. `paceline.model_files.hub.hub` finds them."""\n'


def stage(folder: Path) -> None:
    """Write the package to `folder`, which is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    package = folder / "paceline_smollm2"
    package.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("pyproject.toml"), folder)
    (package / "__init__.py").write_text(INIT)
    shutil.copy(find_model(EMBEDDED), package)
    for name in shipped_drafts():
        shutil.copytree(find_model(name), package / "drafts" / name)


if __name__ == "__main__":
    stage(Path(sys.argv[1]))

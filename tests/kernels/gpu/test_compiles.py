import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = "tests.kernels.gpu.compile_for_hopper"


@pytest.mark.slow
def test_the_kernels_of_a_pass_compile_without_a_gpu(tmp_path: Path) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-m", SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    in_layers = ["attention_kernel", "embed_kernel", "linear_kernel", "pair_kernel", "tree_kernel"]
    assert run.stdout.split() == sorted(
        [
            *in_layers,
            "_add_ranks",
            "_bias",
            "_block",
            "_combine",
            "_copy_rows",
            "_count",
            "_gated",
            "_norm",
            "_penalise",
            "_product",
            "_prompt_attention",
            "_route",
            "_row_maxima",
            "_score",
            "_sort",
        ]
    )
    # Products of 16 keys at a time: a width of 4 would take every other pair of 32
    layouts = [text for kernel in ("attention_kernel", "tree_kernel") for text in read_layouts(tmp_path, kernel)]
    assert len(layouts) > 3
    assert all("kWidth = 2" in layout and "kWidth = 4" not in layout for layout in layouts)


def read_layouts(folder: Path, kernel: str) -> list[str]:
    return [file.read_text() for file in folder.rglob(f"{kernel}.ttgir")]

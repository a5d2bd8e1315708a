import json
import os
import subprocess
import sys
from pathlib import Path

from paceline.core.config import EngineConfig
from paceline.engine.start.compile import CompileRequest
from paceline.engine.start.compile_child import GPUS


def test_a_request_survives_its_journey_to_the_compiler() -> None:
    request = CompileRequest(EngineConfig(model="smollm2", device="meta", draft="none"), GPUS["h200"], 3)
    assert CompileRequest.from_json(request.to_json()) == request


def run_script(name: str, folder: Path) -> list[str]:
    """The lines it prints."""
    run = subprocess.run(
        [sys.executable, "-m", f"tests.engine.start.{name}"],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.splitlines()


def test_the_kernels_of_an_engine_are_listed_and_compiled_without_weights_and_without_a_gpu(tmp_path: Path) -> None:
    """Triton's interpreter accepts kernels that its compiler refuses."""
    counts, names = run_script("listed_kernels", tmp_path)[-2:]
    listed, distinct, first, second = counts.split()
    assert listed == distinct
    assert int(listed) < 150
    assert (first, second) == ("True", "False")  # the second time it is in the cache folder
    assert {"attention_kernel", "linear_kernel", "pair_kernel", "_accept", "_pick", "_rotate"} <= set(names.split())


def test_the_kernels_of_8_bit_products_of_more_than_64_rows_are_listed_and_compiled(tmp_path: Path) -> None:
    listed, compiled = run_script("listed_many_rows", tmp_path)[-2:]
    assert json.loads(listed) == [[576, False], [576, True], [1536, False], [1536, True]]
    assert compiled == "True"

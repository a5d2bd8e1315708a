import os
import subprocess
import sys
from pathlib import Path

from paceline.core.config import EngineConfig
from paceline.engine.start.compile_request import CompileRequest
from paceline.engine.start.warm import GPUS


def test_a_request_survives_its_journey_to_the_compiler() -> None:
    request = CompileRequest(EngineConfig(model="smollm2", device="meta", draft="none"), GPUS["h200"], 3)
    assert CompileRequest.from_json(request.to_json()) == request


def test_the_kernels_of_an_engine_are_listed_and_compiled_without_weights_and_without_a_gpu(tmp_path: Path) -> None:
    """Triton's interpreter accepts kernels that its compiler refuses."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.engine.start.listed_kernels"],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    counts, names = run.stdout.splitlines()[-2:]
    listed, distinct, first, second = counts.split()
    assert listed == distinct
    assert int(listed) < 150
    assert (first, second) == ("True", "False")  # the second time it is in the cache folder
    assert {"_attention", "linear_kernel", "pair_kernel", "_accept", "_pick", "_rotate"} <= set(names.split())

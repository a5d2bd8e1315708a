"""`make chaos` for a few seconds, on a small model."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.test_processes import checkpoints

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "trust" / "chaos.py"


@pytest.mark.slow
def test_no_stream_is_lost_or_different_under_faults(tmp_path: Path) -> None:
    target, draft = checkpoints(tmp_path)
    options = ["--minutes", "0.4", "--streams", "8", "--tokens", "32", "--every", "1", "--seed", "3"]
    command = [sys.executable, str(SCRIPT), "--model", target, "--draft", draft, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("| ") and line[2].isdigit()]
    streams, _, _, lost, different, leaked, *_ = (cell.strip() for cell in row.strip("|").split("|"))
    assert int(streams) > 0
    assert (lost, different, leaked) == ("0", "0", "0")

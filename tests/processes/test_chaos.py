"""`make chaos` and `make soak`, short, on models of random weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRUST = ROOT / "benchmarks" / "trust"


def rows(script: str, *options: str) -> list[list[str]]:
    """The rows of the script's tables. It must end with status 0."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, str(TRUST / script), *options],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.slow
def test_no_stream_is_lost_or_different_under_two_faults_at_once() -> None:
    faults = ("kill gateway", "kill target", "network")
    found = rows("chaos.py", "--pairs", "4", "--streams", "4", "--seed", "3", "--faults", *faults)
    total = dict(zip(found[0], found[1], strict=True))
    assert int(total["streams"]) > 0
    assert (total["lost"], total["different"]) == ("0", "0")
    pairs = [row for row in found if row[0].startswith(faults)]
    assert sum(int(row[1]) for row in pairs) == 4
    assert all(row[3:5] == ["0", "0"] for row in pairs)


@pytest.mark.slow
def test_no_stream_is_lost_while_a_cluster_is_scaled_and_its_draft_swapped() -> None:
    found = rows("soak.py", "--minutes", "0.1", "--every", "1")
    assert found[0] == ["streams", "tokens", "lost", "different", "longest gap"]
    assert int(found[1][0]) > 0
    assert found[1][2:4] == ["0", "0"]

"""The kept corpus of every fuzz target, and a few changed inputs, always the same: each is accepted or refused with a typed
error, within 5 seconds and 500 MB. `make fuzz` looks for further ones.
"""

import json
import subprocess
import sys

from tests.fuzz.target import CORPUS, MODULES

EXAMPLES = 15


def test_kept_and_changed_inputs_end_in_typed_errors() -> None:
    """In a process of its own, which a library that aborts cannot take along."""
    command = [sys.executable, "-m", "tests.fuzz.run", "--examples", str(EXAMPLES)]
    done = subprocess.run(command, capture_output=True, text=True)
    reports = {report["target"]: report for report in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0, f"after {list(reports)}: {done.stderr[-2000:]}"
    assert list(reports) == list(MODULES)
    assert not [finding for report in reports.values() for finding in report["findings"]]
    assert all(report["inputs"] > EXAMPLES for report in reports.values())


def test_every_target_has_a_well_formed_input() -> None:
    assert sorted(folder.name for folder in CORPUS.iterdir()) == sorted(MODULES)
    assert all(list((CORPUS / name).glob("seed*")) for name in MODULES)

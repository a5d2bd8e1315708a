"""A worker's log: JSON, in its name, and nothing that users wrote."""

import json
import subprocess
import sys

CODE = """
import logging
from paceline.telemetry.log import log_as
log_as("target-0")
log = logging.getLogger("paceline.worker.main")
log.debug("no")
log.info("loading %s", "a model", extra={"prompt": "my secret", "request_id": "r-1"})
try:
    1 / 0
except ZeroDivisionError:
    log.exception("it failed")
"""


def test_a_line_a_record_in_the_workers_name() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=60)
    first, second = (json.loads(line) for line in done.stderr.splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "info",
        "logger": "paceline.worker.main",
        "message": "loading a model",
        "worker": "target-0",
        "request_id": "r-1",
    }
    assert second["error"].endswith("ZeroDivisionError: division by zero")

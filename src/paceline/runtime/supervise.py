"""The supervisor that `paceline up` leaves behind: `python -m paceline.runtime.supervise CLUSTER_FILE DESCRIPTOR`.

It goes on in a process of its own that nobody waits for, and writes to the descriptor once its workers are started.
"""

import logging
import os
import signal
import sys
import threading
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.core.json_log import log_as
from paceline.runtime.cluster_file import load_cluster
from paceline.runtime.deployment import running_processes
from paceline.runtime.state import StateFolder

logger = logging.getLogger(__name__)


def main(path: Path, tell: int) -> int:
    if os.fork():
        return 0
    log_as("supervisor")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    try:
        config = load_cluster(path)
        with running_processes(config, StateFolder.of(config)):
            os.write(tell, b"up")
            os.close(tell)
            stop.wait()
    except PacelineError as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))

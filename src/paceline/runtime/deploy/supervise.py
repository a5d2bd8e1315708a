"""The supervisor that `paceline up` leaves behind: `python -m paceline.runtime.deploy.supervise CLUSTER_FILE DESCRIPTOR`.

It goes on in a process of its own that nobody waits for, and writes to the descriptor: `UP` once its workers are started, or
what keeps it from starting them.
"""

import logging
import os
import signal
import sys
import threading
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.runtime.deploy.cluster_file import load_cluster
from paceline.runtime.deploy.deployment import UP, running_processes
from paceline.runtime.deploy.state import StateFolder
from paceline.runtime.json_log import log_as

logger = logging.getLogger(__name__)


def main(path: Path, tell: int) -> int:
    if os.fork():
        return 0
    log_as("supervisor")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    with os.fdopen(tell, "wb") as answer:
        try:
            config = load_cluster(path)
            with running_processes(config, StateFolder.of(config)):
                answer.write(UP)
                answer.close()
                stop.wait()
        except PacelineError as error:
            logger.error("%s", error)
            if not answer.closed:
                answer.write(str(error).encode())
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))

"""The background supervisor of `paceline up`: `python -m paceline.deploy.supervise CLUSTER_FILE DESCRIPTOR`.

It detaches from the command and writes to the descriptor: `UP` once its workers are started, or the error.
"""

import logging
import os
import signal
import sys
import threading
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.deploy.deployment import UP, running_processes
from paceline.deploy.processes import StateFolder, load_cluster
from paceline.telemetry import log_as

logger = logging.getLogger(__name__)


def main(path: Path, descriptor: int) -> int:
    if os.fork():
        return 0
    log_as("supervisor")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    with os.fdopen(descriptor, "wb") as result:
        try:
            config = load_cluster(path)
            with running_processes(config, StateFolder.of(config)):
                result.write(UP)
                result.close()
                stop.wait()
        except PacelineError as error:
            logger.error("%s", error)
            if not result.closed:
                result.write(str(error).encode())
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))

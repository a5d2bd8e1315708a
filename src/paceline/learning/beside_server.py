"""`python -m paceline.learning.beside_server`: the learner that a server starts.

The first line of standard input is the plan as JSON. The end of standard input ends the learner, so that it never outlives the
server.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TextIO

from paceline.core.clock import WallClock
from paceline.learning.plan import LearnPlan
from paceline.train.progress import PlainProgress, stop_on_interrupt

COMMAND = "paceline serve, with `learning.folder`"


def read_plan(line: str) -> LearnPlan:
    options = json.loads(line)
    return LearnPlan(**options | {"out": Path(options["out"])})


def main(stream: TextIO = sys.stdin) -> None:
    plan = read_plan(stream.readline())

    def end_with_server() -> None:
        stream.read()
        os.kill(os.getpid(), signal.SIGTERM)

    clock = WallClock()
    progress = PlainProgress(clock, seconds=60.0)
    with stop_on_interrupt(progress.note) as stop:
        threading.Thread(target=end_with_server, daemon=True).start()
        from paceline.learning.run import learn

        learn(plan, COMMAND, clock, progress, stop)


if __name__ == "__main__":
    main()

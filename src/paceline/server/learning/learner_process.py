"""The learner of a server is a child process. It is restarted if it fails, and it ends with the server."""

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.cluster.health import Backoff
from paceline.core.clock import Clock, WallClock
from paceline.core.errors import InvalidConfig
from paceline.models.loading.hub import pick_draft
from paceline.server.config.config import ServerConfig

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "paceline.learning.beside_server")
POLL = 0.5
GRACE = 10.0
"""Seconds that the learner has to end."""


def learner_plan(config: ServerConfig, url: str, key: str, served_model: str | None = None) -> dict[str, Any]:
    """The plan of the learner, see `learning/plan.py`. Raises `InvalidConfig` if there is no draft to train."""
    learning, engine = config.learning, config.engine
    draft = learning.draft or pick_draft(engine.draft, engine.model)
    if draft is None:
        raise InvalidConfig(
            "learning.folder needs a draft to train: set `draft` to a trained draft, or `learning.draft`. For a draft pool "
            "start `paceline learn URL --cluster CLUSTER.yaml --pool NAME` yourself"
        )
    return {
        "server": url,
        "draft": draft,
        "out": learning.folder,
        "model": engine.model,
        "served_model": served_model,
        "key": key,
        "device": learning.device,
        "share": learning.share,
    }


class LearnerProcess:
    """Starts the child on its own thread, and restarts it after a growing pause."""

    def __init__(
        self, plan: dict[str, Any], command: Sequence[str] = COMMAND, clock: Clock | None = None, poll: float = POLL
    ) -> None:
        self._line = json.dumps(plan).encode() + b"\n"
        self._command, self._clock, self._poll = command, clock or WallClock(), poll
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-learner")
        self.num_starts = 0

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the child. It leaves its folder consistent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        backoff = Backoff()
        while not self._stop.is_set():
            started = self._clock.now()
            self.num_starts += 1
            process = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
            assert process.stdin is not None
            try:
                process.stdin.write(self._line)
                process.stdin.flush()
                while process.poll() is None and not self._stop.wait(self._poll):
                    pass
            except BrokenPipeError:  # it ended before it read its plan
                process.wait()
            if self._stop.is_set():
                self._end(process)
                return
            process.stdin.close()
            seconds = backoff.delay(self._clock.now() - started)
            logger.warning("the learner ended with status %s and starts again in %.0f s", process.returncode, seconds)
            self._stop.wait(seconds)

    @staticmethod
    def _end(process: "subprocess.Popen[bytes]") -> None:
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()


@contextmanager
def open_learner(plan: dict[str, Any] | None) -> Iterator[LearnerProcess | None]:
    """Yields the learner, which ends with the block; `start` starts it. Yields None without a plan."""
    if plan is None:
        yield None
        return
    learner = LearnerProcess(plan)
    try:
        yield learner
    finally:
        learner.close()

"""Ends this process if its GPU waits for a rank that has exited.

A sum over ranks in a CUDA graph has no time limit: without the other rank the device waits forever, and so does every thread
that waits for the device. An error cannot be raised there. Without a GPU, or between passes, a lost rank raises `RankLost`.
"""

import logging
import os
import subprocess
import threading
from collections.abc import Callable, Sequence

STUCK_SECONDS = 20.0
"""Time for the device to finish its work after a rank has exited. Longer than any pass."""
EXIT_STATUS = 70
"""Status of a process that ends this way."""
logger = logging.getLogger(__name__)


def exit_process(message: str) -> None:
    logger.critical(message)
    logging.shutdown()
    os._exit(EXIT_STATUS)


class RankMonitor:
    """Watches the processes of the other ranks, in a thread."""

    def __init__(
        self,
        processes: Sequence["subprocess.Popen[bytes]"],
        finish: Callable[[], None],
        end_process: Callable[[str], None] = exit_process,
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:
        """`finish` blocks until the device has finished its work."""
        self._processes, self._finish, self._end_process = processes, finish, end_process
        self._stuck_seconds = stuck_seconds
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, args=(rank, process), name=f"paceline-rank-{rank}", daemon=True)
            for rank, process in enumerate(processes, 1)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """The ranks may exit from now on."""
        self._closed.set()

    def join(self, seconds: float) -> None:
        """Wait until the threads have ended, at most `seconds` for each."""
        for thread in self._threads:
            thread.join(seconds)

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        process.wait()
        if self._closed.is_set():
            return
        finished = threading.Event()

        def finish() -> None:
            self._finish()
            finished.set()

        threading.Thread(target=finish, name="paceline-rank-finish", daemon=True).start()
        if not finished.wait(self._stuck_seconds) and not self._closed.is_set():
            self._end_process(
                f"rank {rank} of {len(self._processes) + 1} exited with status {process.returncode} during a pass, which "
                "cannot end without it: this process ends; start it again"
            )

"""A thread that reads the cluster's directory at an interval: a worker may join, leave, or return at another address."""

import logging
import threading
from collections.abc import Callable

from paceline.runtime.deploy.directory import Directory, Member

logger = logging.getLogger(__name__)

DIRECTORY_SECONDS = 0.5
"""Interval of directory look-ups."""


class DirectoryWatch:
    """Passes the members to `listener` after each reading, on its own thread, until `close`."""

    def __init__(self, directory: Directory, listener: Callable[[tuple[Member, ...]], None]) -> None:
        self.directory = directory
        self._listener = listener
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-members", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Blocks until the current reading ends, unless the listener itself calls it."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                members = tuple(self.directory.members())
            except Exception as error:  # the directory's own backend may be unavailable for a while
                logger.warning("the cluster's directory cannot be read: %s", error)
            else:
                self._listener(members)
            self._stop.wait(DIRECTORY_SECONDS)

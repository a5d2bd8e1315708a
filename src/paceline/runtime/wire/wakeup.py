"""Wakes a thread that waits on sockets."""

import os
import threading
from contextlib import suppress


class Bell:
    """Any thread rings; the owner polls `descriptor`."""

    def __init__(self) -> None:
        self.descriptor, self._ring = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._ring, False)
        self._is_closed = False
        self._lock = threading.Lock()

    def ring(self) -> None:
        """Nothing happens once it is closed."""
        with self._lock:  # a number that is closed may be another file's a moment later
            if not self._is_closed:
                with suppress(BlockingIOError):  # rung often enough
                    os.write(self._ring, b"!")

    def quiet(self) -> None:
        """Until it is rung again."""
        with suppress(BlockingIOError):
            while os.read(self.descriptor, 4096):
                pass

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            os.close(self.descriptor)
            os.close(self._ring)

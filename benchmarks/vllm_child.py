"""A process of vllm_plugin.py: it answers line by line, within time limits."""

import json
import queue
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOG_LINES = 14
"""Lines of the end of a log."""


class Lost(Exception):
    """A process that did not answer in time, or ended."""


class Child:
    """A process whose standard output is read line by line, with a time limit."""

    def __init__(self, name: str, command: Sequence[str], logs: Path) -> None:
        self.name = name
        self._log_file = logs / f"{name}.log"
        self._started = time.perf_counter()
        with self._log_file.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._lines: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def wait(self, seconds: float) -> float:
        """Seconds from its start to its first line."""
        try:
            at, _ = self._line(max(1.0, self._started + seconds - time.perf_counter()))
        except queue.Empty:
            raise Lost(f"{self.name} was not ready {seconds:.0f} s after its start") from None
        return at - self._started

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._line(seconds)[1])
        except queue.Empty:
            raise Lost(f"{self.name} did not answer within {seconds:.0f} s") from None
        except OSError as error:
            raise Lost(f"{self.name}: {error}") from None
        return answer

    def terminate(self) -> None:
        """Ask it to end; `stop` waits for that."""
        self._process.terminate()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def log_end(self) -> str:
        text = self._log_file.read_text("utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return "\n".join(f"    {line[:200]}" for line in lines[-LOG_LINES:])

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put((time.perf_counter(), line))
        self._lines.put((time.perf_counter(), ""))

    def _line(self, seconds: float) -> tuple[float, str]:
        at, line = self._lines.get(timeout=seconds)
        if not line:
            raise Lost(f"{self.name} ended with status {self._process.wait()}")
        return at, line

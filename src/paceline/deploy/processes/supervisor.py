"""Runs workers as local processes: starts, drains and stops them, and restarts those that exit."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.core.clock import Clock, WallClock
from paceline.core.status import WorkerLife
from paceline.policy.health import Backoff
from paceline.wire.worker_spec import WorkerSpec, read_error

logger = logging.getLogger(__name__)

GRACE = 10.0
"""Seconds that a worker has to exit after SIGTERM."""
POLL = 0.1
STANDARD_ERROR = 2
"""File descriptor; `sys.stderr` may be replaced by an object without one."""
LAST_BYTES = 4096


def worker_command(spec: WorkerSpec) -> list[str]:
    return [sys.executable, "-m", "paceline.worker.main", spec.to_json()]


@dataclass(slots=True, eq=False)
class _Child:
    spec: WorkerSpec
    backoff: Backoff = field(default_factory=Backoff)
    process: "subprocess.Popen[bytes] | None" = None
    started: float = 0.0
    restart_at: float = 0.0
    """Time of the next start."""
    life: WorkerLife = field(default_factory=WorkerLife)
    kill_at: float | None = None
    """Time at which a draining worker is killed. None if the worker does not drain."""


class Supervisor:
    """One thread calls `start`, `add`, `drain`, `poll` and `stop`.

    A worker's standard input is a pipe from this process. If this process dies, the pipe closes and the worker exits.
    Each worker has its own session, so that Ctrl-C reaches the supervisor only.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        log_dir: Path | None = None,
        command: Callable[[WorkerSpec], list[str]] = worker_command,
        clock: Clock | None = None,
        grace: float | None = None,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        """`log_dir` is the folder of the log files, one for each worker. If it is None, workers write to this process's
        standard error. A worker has `grace` seconds to exit, or `GRACE` if that is None. `on_restart` is called after every
        exit and every restart of a worker."""
        self._children = {spec.name: _Child(spec) for spec in specs}
        self._log_dir = log_dir
        self._command = command
        self._clock = clock or WallClock()
        self._grace = GRACE if grace is None else grace
        self._on_restart = on_restart

    @property
    def lives(self) -> dict[str, WorkerLife]:
        """Starts and exits of every worker, by name."""
        return {name: child.life for name, child in self._children.items()}

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of running workers, by name."""
        return {name: child.process.pid for name, child in self._children.items() if child.process is not None}

    @property
    def specs(self) -> dict[str, WorkerSpec]:
        """Specifications of all workers, by name, including draining ones."""
        return {name: child.spec for name, child in self._children.items()}

    @property
    def draining(self) -> set[str]:
        """Names of workers that drain. A worker leaves `specs` when it has exited."""
        return {name for name, child in self._children.items() if child.kill_at is not None}

    def num_failures(self, name: str) -> int:
        """Exits of the worker in a row, each soon after its start."""
        return self._children[name].backoff.num_failures

    def kill(self, name: str) -> None:
        """End a worker that does not answer, with the processes that it started. `poll` restarts it."""
        child = self._children[name]
        if child.process is not None and child.process.poll() is None:
            os.killpg(child.process.pid, signal.SIGKILL)

    @property
    def exit_texts(self) -> dict[str, str]:
        """Exit status or signal of workers that exited and that `poll` has not handled, by name."""
        codes = {name: child.process.poll() for name, child in self._children.items() if child.process is not None}
        return {name: _exit_text(code) for name, code in codes.items() if code is not None}

    def start(self) -> None:
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        for child in self._children.values():
            self._spawn(child)

    def add(self, spec: WorkerSpec) -> None:
        """Start a worker with a new name."""
        assert spec.name not in self._children
        child = self._children[spec.name] = _Child(spec)
        self._spawn(child)

    def update(self, spec: WorkerSpec) -> None:
        """Use this specification when the worker of its name is restarted."""
        self._children[spec.name].spec = spec

    def drain(self, name: str, seconds: float) -> None:
        """Let a worker finish its work and exit within `seconds`. It is not restarted; `poll` removes it."""
        child = self._children[name]
        if child.kill_at is not None:
            return
        child.kill_at = self._clock.now() + seconds + self._grace
        if child.process is None:
            del self._children[name]
            return
        assert child.process.stdin is not None
        try:
            child.process.stdin.write(f"drain {seconds}\n".encode())
            child.process.stdin.flush()
        except BrokenPipeError:  # it has just exited
            pass

    def poll(self) -> None:
        """Detect workers that exited, and restart those whose delay has passed."""
        now = self._clock.now()
        for child in list(self._children.values()):
            if child.process is not None:
                code = child.process.poll()
                if child.kill_at is not None:
                    self._poll_draining(child, code, now)
                    continue
                if code is None:
                    continue
                delay = child.backoff.delay(now - child.started)
                reason = self._reason(child) if code > 0 or child.spec.error_file is not None else ""
                logger.warning(
                    "%s exited with %s%s; restarting it in %.1f s", child.spec.name, _exit_text(code), reason, delay
                )
                self._release(child)
                child.restart_at = now + delay
                child.life = replace(child.life, started=None, last_exit=_exit_text(code) + reason)
                self._on_restart()
            if now >= child.restart_at:
                child.life = replace(child.life, restarts=child.life.restarts + 1)
                self._spawn(child)
                self._on_restart()

    def _poll_draining(self, child: _Child, code: int | None, now: float) -> None:
        """Remove a draining worker that has exited, and kill one that is late."""
        assert child.process is not None
        assert child.kill_at is not None
        if code is None:
            if now >= child.kill_at:
                logger.warning("%s did not drain in time and is killed", child.spec.name)
                self.kill(child.spec.name)
            return
        logger.info("%s has drained and exited with %s", child.spec.name, _exit_text(code))
        self._release(child)
        del self._children[child.spec.name]
        self._on_restart()

    def run(self, stop: threading.Event) -> None:
        """Supervise until `stop` is set, then stop all workers."""
        try:
            while not stop.wait(POLL):
                self.poll()
        finally:
            self.stop()

    def stop(self) -> None:
        """Terminate all workers, and kill those that do not exit in time. Only processes started here are affected."""
        running = [child for child in self._children.values() if child.process is not None]
        for child in running:
            assert child.process is not None
            assert child.process.stdin is not None
            child.process.stdin.close()  # a worker stops without a drain
            child.process.terminate()
        deadline = self._clock.now() + self._grace
        for child in running:
            assert child.process is not None
            try:
                child.process.wait(max(0.0, deadline - self._clock.now()))
            except subprocess.TimeoutExpired:
                logger.warning("%s did not exit within %.0f s and is killed", child.spec.name, self._grace)
                os.killpg(child.process.pid, signal.SIGKILL)  # with the processes that it started
                child.process.wait()
            self._release(child)

    def _spawn(self, child: _Child) -> None:
        if child.spec.error_file is not None:
            Path(child.spec.error_file).unlink(missing_ok=True)
        path = self._log(child)
        with nullcontext(STANDARD_ERROR) if path is None else path.open("ab") as log:
            child.process = subprocess.Popen(
                self._command(child.spec), stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        child.started = self._clock.now()
        child.life = replace(child.life, started=time.time())

    def _reason(self, child: _Child) -> str:
        """The error that ended the worker, in parentheses. Empty if the error is not known."""
        if child.spec.error_file is not None:
            error = read_error(Path(child.spec.error_file), "")
            return f" ({error})" if str(error) else ""
        log = self._log(child)
        return "" if log is None else _last_error(log)

    def _log(self, child: _Child) -> Path | None:
        return None if self._log_dir is None else self._log_dir / f"{child.spec.name}.log"

    @staticmethod
    def _release(child: _Child) -> None:
        assert child.process is not None
        assert child.process.stdin is not None
        child.process.stdin.close()
        child.process = None


def _last_error(log: Path) -> str:
    """The last log line in parentheses, if it is an error or the end of a traceback. Otherwise empty."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:  # the log was removed
        return ""
    last = lines[-1].strip() if lines else ""
    try:
        record = json.loads(last)
        last = record["message"] if record["level"] in ("error", "critical") else ""
    except (ValueError, KeyError, TypeError):
        pass
    return f" ({last})" if last else ""


def _exit_text(code: int) -> str:
    return f"status {code}" if code >= 0 else signal.Signals(-code).name

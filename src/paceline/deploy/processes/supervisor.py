"""Runs workers as local processes: starts, drains and stops them, and restarts those that exit."""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from paceline.core.child import ChildProcess, RestartedChild, exit_text
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
class _Worker:
    spec: WorkerSpec
    backoff: Backoff
    child: RestartedChild
    life: WorkerLife = field(default_factory=WorkerLife)
    kill_at: float | None = None
    """Time at which a draining worker is killed. None if the worker does not drain."""

    @property
    def process(self) -> ChildProcess | None:
        return self.child.process


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
        output: int | None = None,
    ) -> None:
        """`log_dir` is the folder of the log files, one for each worker. If it is None, workers write to `output`, a file
        descriptor, or to standard error. A worker has `grace` seconds to exit, or `GRACE` if that is None. `on_restart` is
        called after every exit and every restart of a worker."""
        self._log_dir = log_dir
        self._command = command
        self._clock = clock or WallClock()
        self._grace = GRACE if grace is None else grace
        self._on_restart = on_restart
        self._output = STANDARD_ERROR if output is None else output
        self._workers = {spec.name: self._worker(spec) for spec in specs}

    @property
    def lives(self) -> dict[str, WorkerLife]:
        """Starts and exits of every worker, by name."""
        return {name: worker.life for name, worker in self._workers.items()}

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of running workers, by name."""
        return {name: worker.process.pid for name, worker in self._workers.items() if worker.process is not None}

    @property
    def specs(self) -> dict[str, WorkerSpec]:
        """Specifications of all workers, by name, including draining ones."""
        return {name: worker.spec for name, worker in self._workers.items()}

    @property
    def draining(self) -> set[str]:
        """Names of workers that drain. A worker leaves `specs` when it has exited."""
        return {name for name, worker in self._workers.items() if worker.kill_at is not None}

    def num_failures(self, name: str) -> int:
        """Exits of the worker in a row, each soon after its start."""
        return self._workers[name].backoff.num_failures

    def kill(self, name: str) -> None:
        """End a worker that does not answer, with the processes that it started. `poll` restarts it."""
        process = self._workers[name].process
        if process is not None and process.exit_code is None:
            process.kill()

    @property
    def exit_texts(self) -> dict[str, str]:
        """Exit status or signal of workers that exited and that `poll` has not handled, by name."""
        codes = {name: worker.process.exit_code for name, worker in self._workers.items() if worker.process is not None}
        return {name: exit_text(code) for name, code in codes.items() if code is not None}

    def start(self) -> None:
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        for worker in self._workers.values():
            self._start(worker)

    def add(self, spec: WorkerSpec) -> None:
        """Start a worker with a new name."""
        assert spec.name not in self._workers
        worker = self._workers[spec.name] = self._worker(spec)
        self._start(worker)

    def update(self, spec: WorkerSpec) -> None:
        """Use this specification when the worker of its name is restarted."""
        self._workers[spec.name].spec = spec

    def drain(self, name: str, seconds: float) -> None:
        """Let a worker finish its work and exit within `seconds`. It is not restarted; `poll` removes it."""
        worker = self._workers[name]
        if worker.kill_at is not None:
            return
        worker.kill_at = self._clock.now() + seconds + self._grace
        if worker.process is None:
            del self._workers[name]
            return
        worker.process.send(f"drain {seconds}\n".encode())  # unless it has just exited

    def poll(self) -> None:
        """Detect workers that exited, and restart those whose delay has passed."""
        for worker in list(self._workers.values()):
            if worker.kill_at is not None:
                self._poll_draining(worker, worker.kill_at)
                continue
            ended = worker.child.poll()
            if ended is not None:
                code = ended.exit_code
                reason = self._reason(worker) if code > 0 or worker.spec.error_file is not None else ""
                logger.warning(
                    "%s exited with %s%s; restarting it in %.1f s",
                    worker.spec.name,
                    exit_text(code),
                    reason,
                    ended.pause,
                )
                worker.life = replace(worker.life, started=None, last_exit=exit_text(code) + reason)
                self._on_restart()
            if worker.child.is_due:
                worker.life = replace(worker.life, restarts=worker.life.restarts + 1)
                self._start(worker)
                self._on_restart()

    def _poll_draining(self, worker: _Worker, kill_at: float) -> None:
        """Remove a draining worker that has exited, and kill one that is late."""
        assert worker.process is not None
        code = worker.process.exit_code
        if code is None:
            if self._clock.now() >= kill_at:
                logger.warning("%s did not drain in time and is killed", worker.spec.name)
                worker.process.kill()
            return
        logger.info("%s has drained and exited with %s", worker.spec.name, exit_text(code))
        worker.child.release()
        del self._workers[worker.spec.name]
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
        running = [(worker, worker.process) for worker in self._workers.values() if worker.process is not None]
        for _, process in running:
            process.close_input()  # a worker stops without a drain
            process.terminate()
        deadline = self._clock.now() + self._grace
        for worker, process in running:
            if process.wait(max(0.0, deadline - self._clock.now())) is None:
                logger.warning("%s did not exit within %.0f s and is killed", worker.spec.name, self._grace)
                process.kill()  # with the processes that it started
                process.wait()
            worker.child.release()

    def _worker(self, spec: WorkerSpec) -> _Worker:
        backoff = Backoff()
        child = RestartedChild(lambda: self._spawn(self._workers[spec.name].spec), backoff.delay, self._clock)
        return _Worker(spec, backoff, child)

    def _start(self, worker: _Worker) -> None:
        worker.child.start()
        worker.life = replace(worker.life, started=time.time())

    def _spawn(self, spec: WorkerSpec) -> ChildProcess:
        for file in (spec.error_file, spec.address_file):
            if file is not None:
                Path(file).unlink(missing_ok=True)
        with self._open_log(spec) as log:
            return ChildProcess(self._command(spec), stdout=log, stderr=log)

    def _open_log(self, spec: WorkerSpec) -> AbstractContextManager[int | IO[bytes]]:
        """The worker's log. If the file cannot be written it is `output`: no log is no reason not to restart a worker."""
        path = self._log(spec)
        if path is not None:
            try:
                return path.open("ab")
            except OSError as error:
                logger.warning("%s has no log file: %s", spec.name, error)
        return nullcontext(self._output)

    def _reason(self, worker: _Worker) -> str:
        """The error that ended the worker, in parentheses. Empty if the error is not known."""
        if worker.spec.error_file is not None:
            error = read_error(Path(worker.spec.error_file), "")
            return f" ({error})" if str(error) else ""
        log = self._log(worker.spec)
        return "" if log is None else _last_error(log)

    def _log(self, spec: WorkerSpec) -> Path | None:
        return None if self._log_dir is None else self._log_dir / f"{spec.name}.log"


def _last_error(log: Path) -> str:
    """The last log line in parentheses, if it is an error or the end of a traceback. Otherwise it is empty."""
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

"""Child processes: how they are started, end with their parent, answer line by line, and are started again.

A child usually ends with its parent because its standard input is a pipe from it: the pipe closes when the parent dies, also by
SIGKILL, and the child exits at the end of its input. A program that does not read its input gets a signal instead.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from subprocess import DEVNULL, PIPE, STDOUT
from typing import IO, NamedTuple

from paceline.core.clock import Clock
from paceline.core.machine import add_child_time, child_cpu_seconds

__all__ = ["DEVNULL", "PIPE", "STDOUT", "ChildProcess", "Ended", "LineChild", "RestartedChild", "exit_text"]

PR_SET_PDEATHSIG = 1
SECRETS = ("PACELINE_ADMIN_KEY",)
"""Variables that no child gets: who can read a child's environment could open the routes of operators."""
Stream = int | IO[bytes] | None
"""A file, a file descriptor, or a constant of `subprocess`. None if the child uses the stream of this process."""


class ChildProcess:
    """A child process. It starts with the object."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: Stream = PIPE,
        stdout: Stream = None,
        stderr: Stream = None,
        environment: Mapping[str, str] | None = None,
        file_descriptors: Sequence[int] = (),
        own_session: bool = True,
        ends_by_signal: bool = False,
    ) -> None:
        """`environment` is that of this process by default, always without `SECRETS`. `file_descriptors` stay open in the
        child. With `own_session`, Ctrl-C does not reach the child, and `kill` also ends the processes that it started. With
        `ends_by_signal`, Linux sends SIGTERM to the child when this process ends."""
        self._has_session = own_session
        self._process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=_without_secrets(os.environ if environment is None else environment),
            pass_fds=tuple(file_descriptors),
            start_new_session=own_session,
            preexec_fn=_end_with_parent if ends_by_signal and sys.platform == "linux" else None,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit status, or the negative number of the signal that ended the child. None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float | None = None) -> int | None:
        """Waits for the end of the child, without a limit if `seconds` is None. Returns `exit_code`."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def send(self, *parts: bytes) -> bool:
        """Writes to the child's standard input. Returns False if the child no longer reads."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.writelines(parts)
            self._process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def read_line(self) -> bytes:
        """The next line of the child's standard output. It is empty if the child closed it."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def read_all(self) -> bytes:
        """What the child writes to its standard output until it closes it."""
        assert self._process.stdout is not None
        return self._process.stdout.read()

    def close_input(self) -> None:
        """Tells a child that reads its standard input to the end to exit."""
        if self._process.stdin is not None:
            with suppress(OSError):  # the child does not read what was written
                self._process.stdin.close()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        """Ends the child, and the processes of its session if it has its own. `wait` waits for the end."""
        if not self._has_session:
            self._process.kill()
        elif self._process.returncode is None:  # until then no other process can have this id
            with suppress(ProcessLookupError, PermissionError):  # all of them have exited
                os.killpg(self.pid, signal.SIGKILL)

    def stop(self, grace: float) -> None:
        """Terminates the child, and kills it if it does not exit within `grace` seconds."""
        self.terminate()
        if self.wait(grace) is None:
            self.kill()
            self.wait()
        self.close()

    def close(self) -> None:
        """Closes the pipes to the child."""
        if self._process.stdout is not None:
            self._process.stdout.close()
        self.close_input()


class LineChild:
    """A child that answers each message with one line. Its standard error is discarded. It is killed when this object or this
    process ends."""

    def __init__(self, command: Sequence[str]) -> None:
        self._child = ChildProcess(command, stdout=PIPE, stderr=DEVNULL)
        self._end = weakref.finalize(self, _kill_and_close, self._child)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_running(self) -> bool:
        return self._child.exit_code is None

    def ask(self, message: Sequence[bytes], seconds: float) -> bytes:
        """The line that answers the parts of `message`. It is empty if the child ended, or was killed after `seconds`. Its
        processor time counts as that of the calling thread (`thread_cpu_seconds`)."""
        began = child_cpu_seconds(self.pid)
        timer = threading.Timer(seconds, self._child.kill)
        timer.start()
        try:
            return self._child.read_line() if self._child.send(*message) else b""
        except OSError:
            return b""
        finally:
            timer.cancel()
            add_child_time(max(0.0, child_cpu_seconds(self.pid) - began))

    def tell(self, line: bytes) -> None:
        """Writes a line that has no answer. The next `ask` notices that the child has ended."""
        with suppress(OSError):
            self._child.send(line)

    def kill(self) -> None:
        """Ends the child; an `ask` under way, on another thread, then returns."""
        self._child.kill()

    def close(self) -> None:
        """Kills the child, waits for its end and closes the pipes. Can be called twice."""
        self._end()


class Ended(NamedTuple):
    """The end of a child that is to be restarted."""

    exit_code: int
    pause: float
    """Seconds until the restart is due."""


class RestartedChild:
    """A child that is started again after it has ended. One thread makes all calls."""

    def __init__(self, start: Callable[[], ChildProcess], pause: Callable[[float], float], clock: Clock) -> None:
        """`start` starts the child. `pause` returns the seconds until a restart, given the seconds that the child ran."""
        self._start, self._pause, self._clock = start, pause, clock
        self.process: ChildProcess | None = None
        """None before the first start, and from the end of a child until its restart."""
        self.num_starts = 0
        self._started = self._restart_at = 0.0

    def start(self) -> ChildProcess:
        assert self.process is None
        self.process = self._start()
        self.num_starts += 1
        self._started = self._clock.now()
        return self.process

    @property
    def is_due(self) -> bool:
        """Whether the child has ended and its pause is over: `start` restarts it."""
        return self.process is None and self._clock.now() >= self._restart_at

    def poll(self) -> Ended | None:
        """How the child ended. None if it runs, or if its end was returned before."""
        if self.process is None:
            return None
        code = self.process.exit_code
        if code is None:
            return None
        now = self._clock.now()
        pause = self._pause(now - self._started)
        self._restart_at = now + pause
        self.release()
        return Ended(code, pause)

    def stop(self, grace: float) -> None:
        """Stops the child, if it runs, as `ChildProcess.stop` does."""
        if self.process is not None:
            self.process.stop(grace)
            self.process = None

    def release(self) -> None:
        """Forgets a child that has exited."""
        assert self.process is not None
        self.process.close()
        self.process = None


def _without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in SECRETS}


def exit_text(code: int) -> str:
    """The exit status of a child, or the name of the signal that ended it."""
    return f"status {code}" if code >= 0 else signal.Signals(-code).name


def _kill_and_close(child: ChildProcess) -> None:
    child.kill()
    child.wait()
    child.close()


def _end_with_parent() -> None:
    """Runs in the child process. It requests SIGTERM for the time when the parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == 1:  # the parent ended before
        os._exit(1)

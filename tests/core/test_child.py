"""Child processes: how they start, answer, end and are started again."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from paceline.core.child import DEVNULL, PIPE, ChildProcess, Ended, LineChild, RestartedChild, exit_text
from paceline.core.clock import VirtualClock
from paceline.core.machine import thread_cpu_seconds

READS = "import sys; sys.stdin.read()"
SLEEPS = "import time; time.sleep(600)"
ECHO = "import sys\nfor line in sys.stdin: print(line.strip()[::-1], flush=True)"
IGNORES_SIGTERM = (
    "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); sys.stdin.read()"
)
WITH_GRANDCHILD = (
    "import subprocess, sys, time\n"
    f"print(subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]).pid, flush=True)\n"
    "time.sleep(600)"
)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def has_exited(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def ended(child: ChildProcess) -> Iterator[ChildProcess]:
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        child.close()


# ---------------------------------------------------------------- one child


def test_a_child_that_reads_its_input_ends_with_it() -> None:
    with ended(ChildProcess(python(READS))) as child:
        assert child.exit_code is None
        assert child.wait(0.01) is None
        child.close_input()
        assert child.wait(30) == 0
        assert child.exit_code == 0


def test_what_is_sent_is_read_and_answered() -> None:
    with ended(ChildProcess(python("print(input() + input())"), stdout=PIPE)) as child:
        assert child.send(b"one\n", b"two\n")
        assert child.read_all() == b"onetwo\n"
        assert child.wait(30) == 0
        assert not child.send(b"late\n")


def test_the_environment_and_the_descriptors_are_passed() -> None:
    reader, writer = os.pipe()
    code = "import os, sys; os.write(int(sys.argv[1]), os.environ['WORD'].encode())"
    environment = {**os.environ, "WORD": "seven"}
    child = ChildProcess(
        [*python(code), str(writer)], stdin=DEVNULL, environment=environment, file_descriptors=[writer]
    )
    with ended(child):
        os.close(writer)
        with open(reader, "rb") as file:
            assert file.read() == b"seven"


@pytest.mark.parametrize("is_given", [False, True])
def test_no_child_gets_the_admin_key(is_given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_ADMIN_KEY", "open-sesame")
    environment = dict(os.environ) if is_given else None
    child = ChildProcess(python("import os; print(dict(os.environ))"), stdout=PIPE, environment=environment)
    with ended(child):
        printed = child.read_all()
    assert b"'PATH'" in printed
    assert b"open-sesame" not in printed


def test_stop_terminates() -> None:
    child = ChildProcess(python(SLEEPS))
    child.stop(30)
    assert child.exit_code == -signal.SIGTERM


def test_stop_kills_after_the_grace() -> None:
    child = ChildProcess(python(IGNORES_SIGTERM), stdout=PIPE)
    assert child.read_line() == b"up\n"
    child.stop(0.05)
    assert child.exit_code == -signal.SIGKILL
    child.stop(0.05)  # a second call does nothing


def test_kill_ends_the_session() -> None:
    with ended(ChildProcess(python(WITH_GRANDCHILD), stdout=PIPE)) as child:
        grandchild = int(child.read_line())
        assert os.getsid(child.pid) == child.pid
        child.kill()
        until(lambda: has_exited(grandchild))


def test_without_a_session_only_the_child_is_killed() -> None:
    with ended(ChildProcess(python(WITH_GRANDCHILD), stdout=PIPE, own_session=False)) as child:
        grandchild = int(child.read_line())
        try:
            assert os.getsid(child.pid) == os.getsid(0)
            child.kill()
            assert child.wait(30) == -signal.SIGKILL
            assert not has_exited(grandchild)
        finally:
            os.kill(grandchild, signal.SIGKILL)


def test_an_exit_has_a_text() -> None:
    assert (exit_text(0), exit_text(3), exit_text(-9)) == ("status 0", "status 3", "SIGKILL")


# ---------------------------------------------------------------- lines


@pytest.fixture
def echo() -> Iterator[LineChild]:
    child = LineChild(python(ECHO))
    yield child
    child.close()


def test_a_message_is_answered_with_a_line(echo: LineChild) -> None:
    assert echo.ask([b"abc\n"], 30) == b"cba\n"
    assert echo.ask([b"a", b"bc", b"d\n"], 30) == b"dcba\n"
    assert echo.is_running


BURN = """
import sys, time
for line in sys.stdin:
    end = time.process_time() + 0.1
    while time.process_time() < end: pass
    print(line.strip(), flush=True)
"""


def test_the_time_that_a_child_computes_is_that_of_its_caller() -> None:
    child = LineChild(python(BURN))
    before = thread_cpu_seconds()
    assert child.ask([b"abc\n"], 60) == b"abc\n"
    assert thread_cpu_seconds() - before >= 0.08
    child.close()


def test_an_answer_has_a_time_limit(echo: LineChild) -> None:
    assert echo.ask([b"abc\n"], 30) == b"cba\n"
    os.kill(echo.pid, signal.SIGSTOP)
    assert echo.ask([b"abc\n"], 0.05) == b""
    until(lambda: not echo.is_running)


def test_a_child_that_ended_answers_nothing(echo: LineChild) -> None:
    os.kill(echo.pid, signal.SIGKILL)
    until(lambda: not echo.is_running)
    assert echo.ask([b"abc\n"], 30) == b""
    echo.tell(b"abc\n")
    echo.close()
    echo.close()  # a second call does nothing
    assert not psutil.pid_exists(echo.pid)


def test_a_forgotten_child_is_killed() -> None:
    child = LineChild(python(SLEEPS))
    pid = child.pid
    del child
    gc.collect()
    assert not psutil.pid_exists(pid)


# ---------------------------------------------------------------- restarts


def test_a_child_is_started_again_after_a_pause() -> None:
    clock, ran = VirtualClock(), []

    def pause(seconds: float) -> float:
        ran.append(seconds)
        return 2.0

    child = RestartedChild(lambda: ChildProcess(python("raise SystemExit(4)")), pause, clock)
    assert child.is_due
    process = child.start()
    assert not child.is_due
    clock.advance(5.0)
    assert process.wait(30) == 4
    assert child.poll() == Ended(4, 2.0)
    assert child.poll() is None
    assert ran == [5.0]
    clock.advance(1.9)
    assert not child.is_due
    clock.advance(0.2)
    assert child.is_due
    child.start()
    assert child.num_starts == 2
    child.stop(30)
    assert child.process is None
    child.stop(30)  # a second call does nothing


# ---------------------------------------------------------------- the end of the parent

PARENT = """
import sys, time
from pathlib import Path
from paceline.core.child import DEVNULL, ChildProcess, LineChild, RestartedChild
from paceline.core.clock import WallClock
from tests.core.test_child import ECHO, READS, SLEEPS, python

reading = ChildProcess(python(READS))
by_signal = ChildProcess(python(SLEEPS), stdin=DEVNULL, own_session=False, ends_by_signal=True)
lines = LineChild(python(ECHO))
assert lines.ask([b"abc\\n"], 30) == b"cba\\n"
restarted = RestartedChild(lambda: ChildProcess(python(READS)), lambda seconds: 0.0, WallClock())
print(reading.pid, by_signal.pid, lines.pid, restarted.start().pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the signal at the parent's end is Linux's")
def test_nothing_runs_after_the_parent_was_killed() -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen(python(PARENT), stdout=subprocess.PIPE, text=True, cwd=root) as parent:
        try:
            assert parent.stdout is not None
            pids = [int(word) for word in parent.stdout.readline().split()]
            assert len(pids) == 4
            time.sleep(0.2)
            assert not any(has_exited(pid) for pid in pids)
        finally:
            parent.kill()
    until(lambda: all(has_exited(pid) for pid in pids))

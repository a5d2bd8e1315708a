"""Processes are started, started again, and never left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from paceline.core.clock import VirtualClock
from paceline.core.config import EngineConfig
from paceline.runtime.deploy.supervisor import Supervisor
from paceline.runtime.deploy.worker_spec import WorkerSpec
from tests.runtime.target_harness import until

SPECS = [WorkerSpec(name, "p", "target", "tcp://127.0.0.1:0", EngineConfig()) for name in ("a", "b")]
PATIENT = "import signal, sys; print('up', flush=True); signal.pause()"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def supervisor(folder: Path, code: str = PATIENT, clock: VirtualClock | None = None) -> Supervisor:
    return Supervisor(SPECS, folder, lambda spec: [sys.executable, "-c", code], clock)


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_logs_are_in_one_place_and_nothing_is_left(tmp_path: Path) -> None:
    one = supervisor(tmp_path / "logs")
    one.start()
    pids = one.pids
    until(lambda: all((tmp_path / "logs" / f"{name}.log").read_text() == "up\n" for name in pids))
    one.stop()
    assert one.pids == {}
    assert all(ended(pid) for pid in pids.values())


def test_who_dies_is_started_again_after_a_while(tmp_path: Path) -> None:
    clock = VirtualClock()
    one = supervisor(tmp_path, clock=clock)
    one.start()
    try:
        first = one.pids
        os.kill(first["a"], signal.SIGKILL)
        until(lambda: one.poll() is None and "a" not in one.pids)  # type: ignore[func-returns-value]
        clock.advance(0.4)
        one.poll()
        assert "a" not in one.pids
        clock.advance(0.2)
        one.poll()
        assert one.pids["a"] != first["a"]
        assert one.pids["b"] == first["b"]
    finally:
        clock.advance(100)
        one.stop()


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ('print(\'{"level": "error", "message": "no such model"}\'); exit(1)', "status 1 (no such model); it"),
        ('print(\'{"level": "info", "message": "loading"}\'); exit(3)', "status 3; it"),
        ("1 / 0", "status 1 (ZeroDivisionError: division by zero); it"),
    ],
)
def test_why_a_worker_ended_is_said(code: str, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = supervisor(tmp_path, code, VirtualClock())
    one.start()
    until(lambda: one.poll() is None and not one.pids)  # type: ignore[func-returns-value]
    assert f"a ended with {why}" in caplog.text


def test_a_worker_whose_log_is_gone_is_started_again_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = f"from pathlib import Path; [log.unlink() for log in Path({str(tmp_path)!r}).glob('a.log')]; exit(4)"
    one = supervisor(tmp_path, code, VirtualClock())
    one.start()
    until(lambda: one.poll() is None and not one.pids)  # type: ignore[func-returns-value]
    assert "a ended with status 4; it" in caplog.text


def test_who_does_not_listen_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.runtime.deploy.supervisor.GRACE", 0.1)
    one = supervisor(tmp_path, STUBBORN)
    one.start()
    pids = one.pids
    until(lambda: all((tmp_path / f"{name}.log").read_text() == "up\n" for name in pids))
    one.stop()
    assert all(ended(pid) for pid in pids.values())


ORPHANS = """
import os, sys, time
from pathlib import Path
from tests.runtime.deploy.test_supervisor import SPECS
from paceline.runtime.deploy.supervisor import Supervisor
code = "import sys, os; print('up', flush=True); sys.stdin.buffer.read(); print('alone', flush=True)"
one = Supervisor(SPECS, Path(sys.argv[1]), lambda spec: [sys.executable, "-c", code])
one.start()
print(*one.pids.values(), flush=True)
time.sleep(60)
"""


def test_workers_notice_that_their_supervisor_was_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHANS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        until(lambda: all((tmp_path / f"{s.name}.log").read_text() == "up\n" for s in SPECS))
        process.kill()
        until(lambda: all((tmp_path / f"{s.name}.log").read_text() == "up\nalone\n" for s in SPECS))
        deadline = time.monotonic() + 10
        while not all(ended(pid) for pid in pids) and time.monotonic() < deadline:
            os.sched_yield()
        assert all(ended(pid) for pid in pids)

"""The supervisor starts, restarts and stops worker processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from paceline.core.clock import VirtualClock
from paceline.core.config import EngineConfig
from paceline.deploy.processes.supervisor import Supervisor
from paceline.wire.worker_spec import WorkerSpec
from tests.processes.target_harness import until

SPECS = [WorkerSpec(name, "p", "target", "tcp://127.0.0.1:0", EngineConfig()) for name in ("a", "b")]
WAITS = "import signal, sys; print('up', flush=True); signal.pause()"
IGNORES_SIGTERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
)


def supervisor(folder: Path, code: str = WAITS, clock: VirtualClock | None = None) -> Supervisor:
    return Supervisor(SPECS, folder, lambda spec: [sys.executable, "-c", code], clock)


def has_exited(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_logs_are_in_one_folder_and_no_process_remains(tmp_path: Path) -> None:
    one = supervisor(tmp_path / "logs")
    one.start()
    pids = one.pids
    until(lambda: all((tmp_path / "logs" / f"{name}.log").read_text() == "up\n" for name in pids))
    one.stop()
    assert one.pids == {}
    assert all(has_exited(pid) for pid in pids.values())


def test_exited_worker_is_restarted_after_a_delay(tmp_path: Path) -> None:
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
    ("code", "reason"),
    [
        ('print(\'{"level": "error", "message": "no such model"}\'); exit(1)', "status 1 (no such model); restarting"),
        ('print(\'{"level": "info", "message": "loading"}\'); exit(3)', "status 3; restarting"),
        ("1 / 0", "status 1 (ZeroDivisionError: division by zero); restarting"),
    ],
)
def test_reason_of_an_exit_is_logged(code: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = supervisor(tmp_path, code, VirtualClock())
    one.start()
    until(lambda: one.poll() is None and not one.pids)  # type: ignore[func-returns-value]
    assert f"a exited with {reason}" in caplog.text


def test_a_worker_starts_where_its_log_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.log").mkdir()
    one = supervisor(tmp_path)
    one.start()
    try:
        assert set(one.pids) == {"a", "b"}
        assert "a has no log file" in caplog.text
    finally:
        one.stop()


def test_worker_without_log_is_restarted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = f"from pathlib import Path; [log.unlink(missing_ok=True) for log in Path({str(tmp_path)!r}).glob('a.log')]; exit(4)"
    one = supervisor(tmp_path, code, VirtualClock())
    one.start()
    until(lambda: one.poll() is None and not one.pids)  # type: ignore[func-returns-value]
    assert "a exited with status 4; restarting" in caplog.text


def test_worker_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.deploy.processes.supervisor.GRACE", 0.1)
    one = supervisor(tmp_path, IGNORES_SIGTERM)
    one.start()
    pids = one.pids
    until(lambda: all((tmp_path / f"{name}.log").read_text() == "up\n" for name in pids))
    one.stop()
    assert all(has_exited(pid) for pid in pids.values())


ORPHANS = """
import os, sys, time
from pathlib import Path
from tests.deploy.processes.test_supervisor import SPECS
from paceline.deploy.processes.supervisor import Supervisor
code = "import sys, os; print('up', flush=True); sys.stdin.buffer.read(); print('alone', flush=True)"
one = Supervisor(SPECS, Path(sys.argv[1]), lambda spec: [sys.executable, "-c", code])
one.start()
print(*one.pids.values(), flush=True)
time.sleep(60)
"""


def test_workers_exit_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHANS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        until(lambda: all((tmp_path / f"{s.name}.log").read_text() == "up\n" for s in SPECS))
        process.kill()
        until(lambda: all((tmp_path / f"{s.name}.log").read_text() == "up\nalone\n" for s in SPECS))
        until(lambda: all(has_exited(pid) for pid in pids))


def test_exits_leave_a_trace(tmp_path: Path) -> None:
    clock, restarts = VirtualClock(), []
    one = Supervisor(
        SPECS, tmp_path, lambda spec: [sys.executable, "-c", WAITS], clock, on_restart=lambda: restarts.append(1)
    )
    one.start()
    try:
        first = one.lives["a"]
        assert (first.restarts, first.last_exit) == (0, "")
        os.kill(one.pids["a"], signal.SIGKILL)
        until(lambda: one.poll() is None and "a" not in one.pids)  # type: ignore[func-returns-value]
        assert (one.lives["a"].started, one.lives["a"].last_exit) == (None, "SIGKILL")
        clock.advance(1.0)
        one.poll()
        life = one.lives["a"]
        assert (life.restarts, life.last_exit) == (1, "SIGKILL")
        assert life.started is not None
        assert first.started is not None
        assert life.started >= first.started
        assert one.lives["b"].restarts == 0
        assert len(restarts) == 2
    finally:
        one.stop()


DRAINS = "import sys; print('up', flush=True); line = sys.stdin.readline(); print(line.strip(), flush=True)"


def test_a_drained_worker_is_not_restarted(tmp_path: Path) -> None:
    clock = VirtualClock()
    one = supervisor(tmp_path, DRAINS, clock)
    one.start()
    try:
        one.drain("a", 5.0)
        assert one.draining == {"a"}
        until(lambda: one.poll() is None and set(one.specs) == {"b"})  # type: ignore[func-returns-value]
        assert (tmp_path / "a.log").read_text() == "up\ndrain 5.0\n"
        clock.advance(60)
        one.poll()
        assert set(one.pids) == {"b"}
        one.add(SPECS[0])
        assert set(one.pids) == {"a", "b"}
    finally:
        one.stop()


def test_a_worker_that_does_not_drain_is_killed(tmp_path: Path) -> None:
    clock = VirtualClock()
    one = supervisor(tmp_path, clock=clock)
    one.start()
    try:
        one.drain("a", 5.0)
        clock.advance(16)
        until(lambda: one.poll() is None and set(one.specs) == {"b"})  # type: ignore[func-returns-value]
    finally:
        one.stop()

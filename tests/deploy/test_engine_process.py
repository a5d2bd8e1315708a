"""The engine process of `paceline serve`."""

import itertools
import os
import signal
import stat
import sys
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest

from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidConfig
from paceline.core.output import OutputEvent, StepOutput
from paceline.deploy import engine_process
from paceline.deploy.engine_process import EngineProcess, running_engine
from paceline.deploy.processes.supervisor import Supervisor
from paceline.targets.client import TargetClient
from paceline.wire.worker_spec import WorkerSpec
from tests.engine.harness import GREEDY, PROMPT, request
from tests.engine.start.test_build import save_checkpoint
from tests.processes.target_harness import until

LENGTH = 200


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    save_checkpoint(tmp_path / "model")
    return EngineConfig(str(tmp_path / "model"), device="cpu", max_num_seqs=2, max_model_len=256, kv_tokens=1024)


def generate(
    client: TargetClient, process: EngineProcess, kill_after: int | None = None, number: int = signal.SIGKILL
) -> list[int]:
    """The tokens of one request. The engine process receives a signal after so many outputs."""
    events: SimpleQueue[OutputEvent] = SimpleQueue()
    numbers = itertools.count(1)

    def listen(event: OutputEvent) -> None:
        events.put(event)
        if next(numbers) == kill_after:  # on the client's thread, which reads nothing meanwhile
            assert process.pid is not None
            os.kill(process.pid, number)

    client.submit(request(f"r{kill_after}", PROMPT, max_tokens=LENGTH, ignore_eos=True, **GREEDY), listen)
    tokens: list[int] = []
    while len(tokens) < LENGTH:
        event = events.get(timeout=60)
        assert isinstance(event, StepOutput)
        tokens += event.tokens
    return tokens


def test_a_killed_engine_is_restarted_and_its_streams_continue(config: EngineConfig) -> None:
    with running_engine(config, log_level="warning") as process, process.connect() as client:
        folder = Path(process.address.removeprefix("ipc://")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        first = process.pid
        expected = generate(client, process)
        assert generate(client, process, kill_after=1) == expected
        assert process.pid not in (None, first)
        (worker,) = client.cluster_status().workers
        assert (worker.name, worker.state, client.cluster_status().continued) == ("engine-0", "ready", 1)
        until(lambda: client.cluster_status().workers[0].life.restarts == 1)
        assert client.cluster_status().workers[0].life.last_exit == "SIGKILL"
        until(lambda: client.engine_status().kv_used == 0)
        last = process.pid
    assert last is not None
    assert not psutil.pid_exists(last)
    assert not folder.exists()


def test_the_error_of_a_start_is_raised_with_its_type_and_not_logged(
    config: EngineConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = EngineConfig(config.model, device="cpu", max_model_len=256, kv_tokens=16)
    with running_engine(broken) as process:
        with pytest.raises(InvalidConfig, match="kv_tokens"):
            process.connect()
        assert process.pid is not None  # its process id, until the supervisor handles the exit; it is not restarted
    log = capfd.readouterr().err
    assert "loading" in log
    assert "kv_tokens" not in log  # the command prints the error


def test_a_long_path_falls_back_to_a_loopback_address(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with running_engine(config) as process:
        assert process.address.startswith("tcp://127.0.0.1:")
    assert list(long.iterdir()) == []


@pytest.mark.slow
def test_a_suspended_engine_is_restarted_and_its_streams_continue(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "SILENT_SECONDS", 1.5)
    with running_engine(config, log_level="warning") as process, process.connect() as client:
        first = process.pid
        expected = generate(client, process)
        assert generate(client, process, kill_after=1, number=signal.SIGSTOP) == expected
        assert process.pid not in (None, first)


def test_starts_that_keep_failing_are_reported(tmp_path: Path) -> None:
    clock = ManualClock()
    spec = WorkerSpec("engine-0", "engine", "target", "ipc:///tmp/unused", EngineConfig("none"))
    supervisor = Supervisor([spec], command=lambda spec: [sys.executable, "-c", ""], clock=clock)
    process = EngineProcess(spec, supervisor)
    supervisor.start()
    try:
        for _ in range(engine_process.FAILED_STARTS):
            assert process._failure() is None
            until(lambda: bool(supervisor.exit_texts))
            supervisor.poll()
            clock.time += 60.0
            supervisor.poll()
        assert "3 times in a row" in (process._failure() or "")
    finally:
        supervisor.stop()


class ManualClock:
    time = 0.0

    def now(self) -> float:
        return self.time

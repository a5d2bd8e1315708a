"""Restarted workers load their model from peers when its files are gone."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.config import EngineConfig
from paceline.deploy.deployment import running_processes
from paceline.deploy.processes.state import StateFolder
from paceline.engine.engine import Engine
from paceline.targets.client import TargetClient
from paceline.transfer.weights.loader import WeightsUnavailable
from paceline.wire.keys import KeyFolder
from paceline.wire.worker_spec import PeerAddress, WeightSpec, WorkerSpec
from paceline.worker.main import Worker, make_worker
from tests.processes.target_harness import StreamReader, until
from tests.processes.test_processes import (
    LIMITS,
    PATIENT,
    checkpoints,
    config,
    member,
    plain,
    requests,
    tokens,
    worker_pid,
)

ANY = "tcp://127.0.0.1:0"


@pytest.mark.slow
def test_a_killed_worker_reloads_its_model_from_peers(tmp_path: Path) -> None:
    models = checkpoints(tmp_path)
    requested = requests(16, max_tokens=24)
    expected = plain(models[0], requested)
    keys = KeyFolder.create(tmp_path / "keys")
    settings = config(models, tmp_path, keys=str(keys.path), health={"canary": 0.0, **PATIENT})
    settings = replace(settings, pools=settings.targets)
    folder = StateFolder.of(settings)
    with (
        running_processes(settings, folder) as directory,
        TargetClient(settings, directory, keys.key_pair("gateway"), start_seconds=60) as llm,
    ):
        until(lambda: len(llm.pool.workers()) == 2 and all(worker.state == "ready" for worker in llm.pool.workers()))
        Path(models[0]).rename(tmp_path / "gone")
        os.kill(worker_pid(member(llm, "target-0")), signal.SIGKILL)
        until(lambda: any(worker.state != "ready" for worker in llm.pool.workers()))
        until(lambda: all(worker.state == "ready" for worker in llm.pool.workers()))
        os.kill(worker_pid(member(llm, "target-1")), signal.SIGKILL)  # target-0 loaded its weights from it
        until(lambda: not llm.pool.targets()["target-1"].is_usable)
        assert tokens(StreamReader(llm.pool, *requested)) == expected
        assert "from target-1" in (folder.logs / "target-0.log").read_text()


@contextmanager
def serving(spec: WorkerSpec) -> Iterator[Worker]:
    worker = make_worker(spec)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join(60)
        assert not thread.is_alive()


def wait_serving(worker: Worker) -> None:
    until(lambda: getattr(worker, "backend", worker)._weights.is_serving)


def test_a_target_warms_up_when_all_its_layers_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, str]] = []
    monkeypatch.setattr(
        Engine, "warm_up", lambda one: seen.append((one.runner.model.is_complete, threading.current_thread().name))
    )
    engine = EngineConfig(model=checkpoints(tmp_path)[0], device="cpu", **LIMITS)
    with serving(WorkerSpec("target-0", "target", "target", ANY, engine, weights=WeightSpec(ANY))) as worker:
        wait_serving(worker)
    assert seen == [(True, "paceline-engine")]


def test_draft_workers_load_from_each_other(tmp_path: Path) -> None:
    _, draft = checkpoints(tmp_path)
    engine = EngineConfig(model=draft, device="cpu", **LIMITS)
    first = WorkerSpec("draft-0", "draft", "draft", ANY, engine, weights=WeightSpec(ANY))
    with serving(first) as source:
        peers = (PeerAddress("draft-0", source.weight_address),)
        nowhere = replace(engine, model=str(tmp_path / "nowhere"))
        second = replace(first, name="draft-1", engine=nowhere, weights=WeightSpec(ANY, peers))
        wait_serving(source)
        with serving(second) as loaded:
            wait_serving(loaded)
        with pytest.raises(WeightsUnavailable, match="nowhere"):
            make_worker(replace(second, weights=WeightSpec(ANY)))

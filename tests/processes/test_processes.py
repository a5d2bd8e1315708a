"""Workers as processes, killed under load: every stream completes with the tokens of plain decoding in one process."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.core.cluster_config import ClusterConfig, cluster_config
from paceline.core.config import EngineConfig
from paceline.core.request import Request, SamplingParams, SpeculationParams
from paceline.deploy.deployment import running_processes
from paceline.deploy.processes.state import StateFolder
from paceline.engine.start.build import build_engine
from paceline.targets.client import TargetClient
from paceline.wire.keys import KeyFolder
from paceline.wire.worker_spec import Member
from tests.engine.start.test_build import save_checkpoint
from tests.fakes import run
from tests.processes.target_harness import StreamReader, until

PATIENT = {"misses": 600, "stall": 300.0}
"""Health of workers that may be slow: only a broken connection counts."""
LIMITS = {"max_num_seqs": 32, "max_batched_tokens": 256, "max_model_len": 256, "kv_tokens": 8192}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return checkpoints(tmp_path_factory.mktemp("models"))


def checkpoints(folder: Path) -> tuple[str, str]:
    """A target slow enough for drafts to arrive in time, and a draft that the shared noise sometimes makes right."""
    return save_checkpoint(folder / "target", num_hidden_layers=16), save_checkpoint(folder / "draft")


def requests(count: int, max_tokens: int = 96) -> list[Request]:
    """Half greedy, half seeded requests; prompts of different lengths, some with a common prefix."""
    shared = tuple(i % 35 for i in range(32))
    made = []
    for i in range(count):
        prompt = (shared if i % 3 == 0 else ()) + tuple((7 * i + j) % 35 for j in range(3 + i % 20))
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=float(i % 2), seed=i, ignore_eos=True, n=2 if i % 16 == 1 else 1
        )
        made.append(Request(f"r{i}", prompt, sampling))
    return made


def plain(model: str, submitted: list[Request]) -> dict[tuple[str, int], list[int]]:
    engine = build_engine(EngineConfig(model=model, device="cpu", **LIMITS))
    off = SpeculationParams(enabled=False)
    return run(engine, [replace(one, speculation=off) for one in submitted]).tokens


def tokens(reader: StreamReader) -> dict[tuple[str, int], list[int]]:
    by_choice: dict[tuple[str, int], list[int]] = {}
    for output in reader.read_all():
        by_choice.setdefault((output.request_id, output.choice), []).extend(output.tokens)
    return by_choice


def config(models: tuple[str, str], folder: Path, **more: Any) -> ClusterConfig:
    target, draft = models
    common = {"replicas": 2, "devices": ["cpu"], "limits": LIMITS}
    speculation = {"depth": "fixed", "max_depth": 4}
    return cluster_config(
        {
            "name": "test",
            "state_dir": str(folder / "state"),
            "health": {"canary": 2.0, **PATIENT},
            "pools": [
                {"name": "target", "role": "target", "model": target, "speculation": speculation, **common},
                {"name": "draft", "role": "draft", "model": draft, "placement": {"with": "target"}, **common},
            ],
            **more,
        }
    )


def worker_pid(member: Member) -> int:
    """Process id of the worker at the member's address."""
    port = int(member.address.rpartition(":")[2])
    for child in psutil.Process().children(recursive=True):
        if any(c.laddr and c.laddr.port == port and c.status == "LISTEN" for c in child.net_connections("tcp")):
            return child.pid
    raise AssertionError(f"no process listens at {member.address}")


def member(llm: TargetClient, name: str) -> Member:
    return next(m for m in llm.pool._watch.directory.members() if m.name == name)


def kill_with_streams(llm: TargetClient, pid: int, reader: StreamReader, late: list[Request]) -> None:
    """Kill `target-0` while it has streams. It may have finished its earlier ones, so it is stopped before it gets some of
    `late`. `late` must be more than it had: an idle target would get them all."""
    os.kill(pid, signal.SIGSTOP)
    reader.submit(*late)
    ids, connection = {request.id for request in late}, llm.pool.targets()["target-0"]
    until(lambda: any(stream.request.id in ids for stream in list(connection.streams.values())))
    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def llm(models: tuple[str, str], tmp_path: Path) -> Iterator[TargetClient]:
    """Two targets and two draft workers, ready, with encrypted connections."""
    keys = KeyFolder.create(tmp_path / "keys")
    settings = config(models, tmp_path, keys=str(keys.path))
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with (
        running_processes(settings, StateFolder.of(settings)) as directory,
        TargetClient(settings, directory, keys.key_pair("gateway"), start_seconds=60) as one,
    ):
        until(lambda: len(one.pool.workers()) == 4 and all(worker.state == "ready" for worker in one.pool.workers()))
        yield one
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before, "a worker was left behind"


def test_kill_9_of_a_draft_worker_and_a_target_under_load(llm: TargetClient, models: tuple[str, str]) -> None:
    draft_worker, killed = (worker_pid(member(llm, name)) for name in ("draft-0", "target-0"))
    submitted, more = requests(64), iter(requests(256)[64:])
    first, late = submitted[:32], submitted[32:]
    reader = StreamReader(llm.pool, *first)
    for _ in range(400):
        reader.read()
    os.kill(draft_worker, signal.SIGKILL)
    for _ in range(400):
        reader.read()
    kill_with_streams(llm, killed, reader, late)
    reader.read_all()
    assert llm.pool.num_continued > 0
    while not any(
        output.accepted for output in reader.outputs
    ):  # the machine's speed decides how many drafts are in time
        submitted.append(next(more))
        reader.submit(submitted[-1])
        reader.read_all()
    assert tokens(reader) == plain(models[0], submitted)
    until(lambda: all(worker.state == "ready" for worker in llm.pool.workers()))  # restarted and used again
    assert worker_pid(member(llm, "target-0")) != killed
    assert tokens(StreamReader(llm.pool, *submitted[:8])) == plain(models[0], submitted[:8])

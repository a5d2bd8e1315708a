"""KV-aware routing between processes with encrypted connections, and a killed worker."""

import os
import signal
from pathlib import Path

import pytest

from paceline.core.cluster_config import cluster_config
from paceline.core.request import Request, SamplingParams
from paceline.deploy.deployment import running_processes
from paceline.deploy.processes.state import StateFolder
from paceline.targets.client import TargetClient
from paceline.wire.keys import KeyFolder
from tests.engine.start.test_build import save_checkpoint
from tests.processes.target_harness import StreamReader, until
from tests.processes.test_processes import LIMITS, PATIENT, member, plain, tokens, worker_pid

SYSTEM = tuple(i % 35 for i in range(100))


def make_request(i: int) -> Request:
    return Request(f"r{i}", (*SYSTEM, i), SamplingParams(max_tokens=4, temperature=1.0, seed=i, ignore_eos=True))


@pytest.mark.slow
def test_prefixes_of_a_killed_worker_are_forgotten(tmp_path: Path) -> None:
    model, keys = save_checkpoint(tmp_path / "target"), KeyFolder.create(tmp_path / "keys")
    pool = {"name": "target", "role": "target", "model": model, "replicas": 2, "devices": ["cpu"], "limits": LIMITS}
    settings = cluster_config(
        {
            "name": "test",
            "router": "kv_aware",
            "keys": str(keys.path),
            "state_dir": str(tmp_path / "state"),
            "health": {"canary": 0.0, **PATIENT},
            "pools": [pool],
        }
    )
    with (
        running_processes(settings, StateFolder.of(settings)) as directory,
        TargetClient(settings, directory, keys.key_pair("gateway"), start_seconds=60) as llm,
    ):
        until(lambda: len(llm.pool.workers()) == 2 and all(worker.state == "ready" for worker in llm.pool.workers()))
        index = llm.pool._caches.index

        def num_blocks() -> dict[str, int]:
            return {name: index.num_blocks(name) for name in ("target-0", "target-1")}

        def run_request(i: int) -> int:
            reader = StreamReader(llm.pool, make_request(i))
            assert tokens(reader) == plain(model, [make_request(i)])
            return reader.outputs[-1].num_cached

        assert run_request(0) == 0
        until(lambda: sum(num_blocks().values()) >= 6)
        assert [run_request(i) for i in range(1, 5)] == [96] * 4
        [holder] = [name for name, count in num_blocks().items() if count]
        os.kill(worker_pid(member(llm, holder)), signal.SIGKILL)
        until(lambda: num_blocks()[holder] == 0)  # known after its restart
        assert run_request(5) == 0
        until(lambda: sum(num_blocks().values()) >= 6)
        assert run_request(6) == 96

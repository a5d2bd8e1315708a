"""Cache tiers of a cluster of processes with encrypted connections: a peer's memory, and the disk after a restart."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.core.cluster_config import cluster_config
from paceline.core.request import Request, SamplingParams
from paceline.deploy.deployment import running_processes
from paceline.deploy.processes.state import StateFolder
from paceline.policy.routing.router import RoundRobin
from paceline.targets.client import TargetClient
from paceline.wire.keys import KeyFolder
from tests.engine.start.test_build import save_checkpoint
from tests.processes.target_harness import StreamReader, until
from tests.processes.test_processes import LIMITS, plain, tokens


def make_request(name: str, first: int, tail: int) -> Request:
    prompt = (first, *(i % 35 for i in range(209)), tail)
    return Request(name, prompt, SamplingParams(max_tokens=4, temperature=1.0, seed=tail, ignore_eos=True))


@contextmanager
def running(tmp_path: Path, model: str, keys: KeyFolder) -> Iterator[TargetClient]:
    limits = {**LIMITS, "kv_disk": str(tmp_path / "kv"), "kv_host_bytes": 1 << 20}
    pool: dict[str, Any] = {"name": "target", "role": "target", "model": model, "replicas": 2, "devices": ["cpu"]}
    settings = cluster_config(
        {
            "name": "test",
            "router": "kv_aware",
            "keys": str(keys.path),
            "state_dir": str(tmp_path / "state"),
            "health": {"canary": 0.0, "heartbeat": 0.1, "misses": 300},
            "handoff_threshold": 40,
            "pools": [{**pool, "limits": limits}],
        }
    )
    with (
        running_processes(settings, StateFolder.of(settings)) as directory,
        TargetClient(settings, directory, keys.key_pair("gateway"), start_seconds=60) as llm,
    ):
        until(lambda: len(llm.pool.workers()) == 2 and all(worker.state == "ready" for worker in llm.pool.workers()))
        yield llm


@pytest.mark.slow
def test_blocks_come_from_a_peer_and_after_a_restart_from_disk(tmp_path: Path) -> None:
    model, keys = save_checkpoint(tmp_path / "target"), KeyFolder.create(tmp_path / "keys")
    with running(tmp_path, model, keys) as llm:
        pool = llm.pool
        pool._streams._router = RoundRobin()  # alternates between target-0 and target-1, whatever they have cached

        def peer_tokens() -> int:
            return sum(worker.handoffs.peer_tokens for worker in llm.pool.workers() if worker.handoffs)

        for number in range(30):  # at first the two have no connection to each other
            for tail in (1, 2):
                one = make_request(f"{number}-{tail}", number, tail)
                stream = StreamReader(pool, one)
                assert tokens(stream) == plain(model, [one])
                until(lambda: pool._caches.index.match(one.prompt_ids).groups != [])  # noqa: B023
            if peer_tokens():
                break
        until(lambda: peer_tokens() > 0)
    with running(tmp_path, model, keys) as llm:
        one = make_request("again", 0, 1)
        until(lambda: bool(llm.pool._caches.index.match(one.prompt_ids).groups))
        stream = StreamReader(llm.pool, one)
        assert tokens(stream) == plain(model, [one])
        assert stream.outputs[-1].num_cached == 208
        until(lambda: (tiers := llm.engine_status().tiers) is not None and tiers.disk_hits == 208)

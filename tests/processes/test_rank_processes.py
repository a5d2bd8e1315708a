"""Prefill and decode workers with different numbers of ranks, as processes with encrypted connections, a draft head, a tier in
host memory and weights from each other: the text equals that of one engine."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from paceline.core.cluster_config import cluster_config
from paceline.deploy.deployment import running_processes
from paceline.deploy.processes.state import StateFolder
from paceline.targets.client import TargetClient
from paceline.wire.keys import KeyFolder
from tests.engine.start.test_build import save_checkpoint
from tests.fakes import tiny_model
from tests.heads import draft_config, draft_tensors, save_draft
from tests.processes.target_harness import StreamReader, until
from tests.processes.test_handoff_processes import LIMITS, SPECULATION, counts, plain, requests
from tests.processes.test_processes import member, tokens, worker_pid


@pytest.mark.slow
@pytest.mark.parametrize(("target_ranks", "prefill_ranks"), [(2, 1), (1, 2)])
def test_text_of_workers_with_other_numbers_of_ranks(target_ranks: int, prefill_ranks: int, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "target", max_position_embeddings=512)
    shape = draft_config(tiny_model(), "eagle")
    head = save_draft(tmp_path / "eagle", shape, draft_tensors(shape))
    keys = KeyFolder.create(tmp_path / "keys")
    common = {"model": model, "devices": ["cpu"], "limits": {**LIMITS, "kv_host_bytes": 8 << 20}}
    target = {"draft": head, "speculation": SPECULATION, "tensor_parallel_size": target_ranks, **common}
    settings = cluster_config(
        {
            "name": "ranks",
            "state_dir": str(tmp_path / "state"),
            "keys": str(keys.path),
            "handoff_threshold": 64,
            "pools": [
                {"name": "target", "role": "target", **target},
                {"name": "prefill", "role": "prefill", "tensor_parallel_size": prefill_ranks, **common},
            ],
        }
    )
    submitted = requests("a", 3, 0)
    expected = plain(model, submitted)
    folder = StateFolder.of(settings)
    with (
        running_processes(settings, folder) as directory,
        TargetClient(settings, directory, keys.key_pair("gateway"), start_seconds=60) as llm,
    ):

        def are_ready() -> bool:
            workers = llm.pool.workers()
            return len(workers) == 2 and all(worker.state == "ready" for worker in workers)

        until(are_ready)
        assert tokens(StreamReader(llm.pool, *submitted)) == expected
        until(lambda: counts(llm, "target").done >= 2)
        assert counts(llm, "target").failed == 0
        pid = worker_pid(member(llm, "target-0"))
        children = psutil.Process(pid).children()
        assert len(children) == target_ranks - 1
        os.kill(pid, signal.SIGKILL)
        assert psutil.wait_procs(children, timeout=60)[1] == []
        until(lambda: not are_ready())
        until(are_ready)
        assert tokens(StreamReader(llm.pool, *requests("b", 2, 3))) == plain(model, requests("b", 2, 3))
        assert "from prefill-0" in (folder.logs / "target-0.log").read_text()

"""Prefill and decode in separate processes with encrypted connections and a draft head: the text equals that of one engine,
also when the prefill worker is killed."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from paceline.core.cluster_config import cluster_config
from paceline.core.config import EngineConfig, from_mapping
from paceline.core.request import Request, SamplingParams, SpeculationParams
from paceline.core.status import HandoffCounts
from paceline.deploy.deployment import running_processes
from paceline.deploy.processes.state import StateFolder
from paceline.engine.start.build import build_engine
from paceline.targets.client import TargetClient
from paceline.wire.keys import KeyFolder
from tests.engine.start.test_build import save_checkpoint
from tests.fakes import run, tiny_model
from tests.heads import draft_config, draft_tensors, save_draft
from tests.processes.target_harness import StreamReader, until
from tests.processes.test_processes import PATIENT, member, tokens, worker_pid

LIMITS = {"max_num_seqs": 16, "max_batched_tokens": 64, "max_model_len": 512, "kv_tokens": 8192}
SPECULATION = {"depth": "fixed", "max_depth": 6, "method": "eagle"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("models") / "target", max_position_embeddings=512)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = draft_config(tiny_model(), "eagle")
    return save_draft(tmp_path_factory.mktemp("heads") / "eagle", config, draft_tensors(config))


@pytest.fixture(scope="module")
def llm(target: str, head: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetClient]:
    folder = tmp_path_factory.mktemp("cluster")
    keys = KeyFolder.create(folder / "keys")
    common = {"model": target, "devices": ["cpu"], "limits": LIMITS}
    settings = cluster_config(
        {
            "name": "split",
            "state_dir": str(folder / "state"),
            "keys": str(keys.path),
            "handoff_threshold": 64,
            "health": PATIENT,
            "pools": [
                {"name": "target", "role": "target", "draft": head, "speculation": SPECULATION, **common},
                {"name": "prefill", "role": "prefill", **common},
            ],
        }
    )
    with (
        running_processes(settings, StateFolder.of(settings)) as directory,
        TargetClient(settings, directory, keys.key_pair("gateway"), start_seconds=60) as one,
    ):
        until(lambda: len(one.pool.workers()) == 2 and all(worker.state == "ready" for worker in one.pool.workers()))
        yield one


def requests(name: str, count: int, first: int) -> list[Request]:
    """Long prompts without common prefixes, half greedy, half sampled."""
    return [
        Request(
            f"{name}{i}",
            tuple((first + 11 * i + 3 * j + j * j // 17) % 35 for j in range(300 + 16 * i)),
            SamplingParams(max_tokens=40, temperature=float(i % 2), seed=i, ignore_eos=True),
        )
        for i in range(count)
    ]


def plain(model: str, submitted: list[Request]) -> dict[tuple[str, int], list[int]]:
    engine = build_engine(EngineConfig(model=model, device="cpu", **LIMITS))
    return run(engine, [replace(one, speculation=SpeculationParams(enabled=False)) for one in submitted]).tokens


def single_engine_drafts(model: str, head: str, one: Request) -> list[tuple[int, int]]:
    """Drafted and accepted tokens of every step in one engine."""
    config = {"model": model, "draft": head, "device": "cpu", "speculation": SPECULATION, **LIMITS}
    engine = build_engine(from_mapping(EngineConfig, config))
    engine.add(engine.validate(one))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return [(output.drafted, output.accepted) for output in outputs]


def counts(llm: TargetClient, role: str) -> HandoffCounts:
    (found,) = [worker.handoffs for worker in llm.pool.workers() if worker.role == role]
    assert found is not None
    return found


def test_text_and_drafts_equal_those_of_one_process(llm: TargetClient, target: str, head: str) -> None:
    (first, *rest) = requests("a", 4, 0)
    stream = StreamReader(llm.pool, first)
    assert tokens(stream) == plain(target, [first])
    assert [(o.drafted, o.accepted) for o in stream.outputs] == single_engine_drafts(target, head, first)
    assert tokens(StreamReader(llm.pool, *rest)) == plain(target, rest)
    until(lambda: counts(llm, "target").done >= 2)
    until(lambda: counts(llm, "prefill").done == counts(llm, "target").done)
    assert counts(llm, "target").bytes == counts(llm, "prefill").bytes > 0
    assert counts(llm, "target").failed == 0


@pytest.mark.slow
def test_kill_9_of_the_prefill_worker_during_a_hand_off(llm: TargetClient, target: str) -> None:
    submitted = requests("k", 3, 5)
    expected = plain(target, submitted)
    pid, before = worker_pid(member(llm, "prefill-0")), counts(llm, "target")
    os.kill(pid, signal.SIGSTOP)  # so that hand-offs are certainly in flight
    stream = StreamReader(llm.pool, *submitted)
    until(lambda: any(worker.kv_use for worker in llm.pool.workers() if worker.role == "target"))
    os.kill(pid, signal.SIGKILL)
    assert tokens(stream) == expected
    until(lambda: counts(llm, "target").failed > before.failed)

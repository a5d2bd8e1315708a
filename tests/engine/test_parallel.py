"""Two ranks on the CPU, over gloo: the same tokens as one rank, and an end for every way to end."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from paceline.core.errors import EngineClosed, InvalidConfig, RankLost
from paceline.core.request import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.start.llm import LLM
from paceline.kernels.cpu import native
from paceline.models.parallel import ranks as module
from paceline.models.parallel.commands import Move
from paceline.models.parallel.runner import ParallelRunner
from tests.engine.start.test_build import engine, prompt, save_checkpoint, texts
from tests.fakes import random_tree, request, run, tiny_engine


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    yield
    native.set_num_threads(1)  # as in conftest: closing gives all cores back to who is left


@contextmanager
def two_ranks(target: str, **options: Any) -> Iterator[Engine]:
    """An engine; afterwards the other rank's process is gone and this one is in no group."""
    built = engine(target, tensor_parallel_size=2, **options)
    assert isinstance(built.runner, ParallelRunner)
    (pid,) = built.runner.ranks.pids
    assert is_running(pid)
    try:
        yield built
    finally:
        built.close()
    built.close()
    assert not is_running(pid)
    assert not dist.is_initialized()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_same_tokens_as_one_rank(target: str, tmp_path: Path) -> None:
    """Greedy, seeded and speculative, by a draft, by a tree whose path moves in the cache, and by an early exit."""
    plain = engine(target, speculation={"enabled": False})
    greedy, seeded = texts(plain, temperature=0.0), texts(plain)
    draft = save_checkpoint(tmp_path / "draft", perturb=0.2)
    with two_ranks(target, draft=draft, speculation={"depth": "fixed", "max_depth": 3}) as built:
        assert built.runner.model.config.num_heads == plain.runner.model.config.num_heads // 2
        assert built.runner.cache[0][0].shape[2] == plain.runner.cache[0][0].shape[2] // 2
        assert texts(built, temperature=0.0) == greedy
        assert texts(built) == seeded
        for method in ("layer_skip", "ngram"):
            one = [request("r", prompt(), {"method": method}, seed=5, max_tokens=24, ignore_eos=True)]
            assert run(built, one).tokens == run(plain, one).tokens, method
        # a tree: its accepted path has to move in the cache of every rank
        trees = tiny_engine(plain.runner.model, random_tree(8), depth=12)
        trees.runner = built.runner
        one = [request("r", prompt(), seed=5, max_tokens=60)]
        result = run(trees, one)
        assert result.accepted > 5
        assert result.tokens == run(tiny_engine(plain.runner.model), one).tokens


def test_a_rank_that_fails_says_why(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 60.0)  # on a busy machine its interpreter ends late
    with two_ranks(target) as built:
        assert isinstance(built.runner, ParallelRunner)
        built.runner.ranks.send(Move((10**9,), (0,), 0))  # no such slot
        with pytest.raises(RankLost, match=r"(?s)rank 1 of 2 exited with status 1.*IndexError"):
            run(built, [request("r", prompt())])


def test_a_dead_rank_ends_with_a_clear_error_and_leaves_nothing_behind(target: str) -> None:
    options = {"kv_tokens": 1024, "max_num_seqs": 4, "max_batched_tokens": 32, "device": "cpu"}
    with LLM(target, tensor_parallel_size=2, **options) as llm:
        assert isinstance(llm.engine.runner, ParallelRunner)
        (pid,) = llm.engine.runner.ranks.pids
        with pytest.raises(InvalidConfig, match="close the other engine first"):
            engine(target, tensor_parallel_size=2)
        stream = llm.stream(prompt(), SamplingParams(max_tokens=100, ignore_eos=True))
        next(stream)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineClosed, match=r"rank 1 of 2 was killed by signal 9.*restart the engine") as error:
            list(stream)
        assert isinstance(error.value.__cause__, RankLost)
    assert not is_running(pid)
    assert not dist.is_initialized()


def test_a_rank_that_cannot_start_is_reported(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spawn = module._spawn

    def stillborn(rank: int) -> module._Member:
        member = spawn(rank)
        member.process.kill()
        return member

    monkeypatch.setattr(module, "_spawn", stillborn)
    with pytest.raises(RankLost, match="rank 1 of 2 was killed"):
        engine(target, tensor_parallel_size=2)
    assert not dist.is_initialized()


ORPHAN = """
import sys
from paceline.core.config import EngineConfig
from paceline.engine.start.build import build_engine
options = {"kv_tokens": 1024, "max_num_seqs": 4, "max_batched_tokens": 32, "device": "cpu"}
engine = build_engine(EngineConfig(sys.argv[1], tensor_parallel_size=2, **options))
print(*engine.runner.ranks.pids, flush=True)
sys.stdin.read()
"""


STUCK_ORPHAN = """
import sys
import torch
from paceline.models.parallel import ranks
from paceline.models.parallel.commands import RankSpec, Release
from paceline.models.parallel.runner import load_parallel
ranks.RANK_PROCESS = "tests.engine.stuck_rank"
_, group = load_parallel(RankSpec(sys.argv[1], 2, torch.device("cpu"), torch.float32))
group.send(Release(0))
print(*group.pids, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("program", [ORPHAN, STUCK_ORPHAN], ids=["waits for commands", "is stuck in one"])
def test_no_rank_outlives_rank_0(target: str, program: str) -> None:
    """Without a guard around its main part, too: a rank is not a copy of the caller's program."""
    command = [sys.executable, "-c", program, target]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    gone, alive = psutil.wait_procs([child], timeout=60)
    assert (gone, alive) == ([child], [])


def test_heads_that_do_not_divide_are_refused_before_anything_starts(target: str) -> None:
    with pytest.raises(InvalidConfig, match=r"tensor_parallel_size 3: 4 heads.*possible: 1, 2, 4"):
        engine(target, tensor_parallel_size=3)

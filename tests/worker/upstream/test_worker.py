"""Two real Paceline servers as workers of `engine: openai` behind one gateway client."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

import pytest

from paceline.core.cluster_config import ClusterConfig, cluster_config
from paceline.core.errors import InvalidConfig, InvalidRequest, PacelineError
from paceline.core.output import StepOutput
from paceline.core.request import Request, SamplingParams, SpeculationParams
from paceline.targets.client import TargetClient
from paceline.wire.worker_spec import FixedDirectory, worker_specs
from paceline.worker.server.server import WorkerServer
from paceline.worker.upstream import build
from paceline.worker.upstream.build import make_upstream_worker
from tests.engine.harness import letters
from tests.gateway.process import Process, server_process

PROMPTS = [(504, 3575, 282, 4649, 314), (1, 4093, 198), (9690, 198, 2683, 359)]


def config_of(urls: list[str], **pool: Any) -> ClusterConfig:
    values = {"name": "up", "role": "target", "engine": "openai", "model": "smollm2", "endpoints": urls, **pool}
    return cluster_config({"pools": [values], "health": {"heartbeat": 0.1, "canary": 0}})


def workers_of(config: ClusterConfig) -> list[WorkerServer]:
    names = [name for pool in config.pools for name in pool.worker_names]
    addresses = {f"{name}{part}": "tcp://127.0.0.1:0" for name in names for part in ("", "/weights")}
    return [make_upstream_worker(spec) for spec in worker_specs(config, addresses, 1)]


class Cluster:
    def __init__(self, servers: list[Process]) -> None:
        self.servers = servers
        self.config = config_of([server.url for server in servers])
        self.workers = workers_of(self.config)
        self.threads = [threading.Thread(target=worker.run) for worker in self.workers]
        for thread in self.threads:
            thread.start()
        specs = worker_specs(self.config, {f"up-{i}{p}": "" for i in range(2) for p in ("", "/weights")}, 1)
        members = tuple(s.member(w.address) for s, w in zip(specs, self.workers, strict=True))
        self.client = TargetClient(self.config, FixedDirectory(members), start_seconds=60)

    def close(self) -> None:
        self.client.close()
        for worker, thread in zip(self.workers, self.threads, strict=True):
            worker.stop()
            thread.join()

    def submit(self, name: str, prompt: tuple[int, ...], **sampling: Any) -> "SimpleQueue[Any]":
        events: SimpleQueue[Any] = SimpleQueue()
        values = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, **sampling}
        self.client.submit(self.client.validate(Request(name, prompt, SamplingParams(**values))), events.put)
        return events


def collect(events: "SimpleQueue[Any]", tokens: list[int], until: int = 10**9) -> list[int]:
    """Adds tokens up to the end of the text, or until there are so many."""
    while len(tokens) < until:
        event = events.get(timeout=60)
        if isinstance(event, PacelineError):
            raise event
        assert isinstance(event, StepOutput)
        tokens += event.tokens
        if event.finish_reason is not None:
            break
    return tokens


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        small = {"draft": "none", "kv_tokens": 8192}
        made = Cluster([stack.enter_context(server_process(**small)) for _ in range(2)])
        try:
            yield made
        finally:
            made.close()


def test_log_probabilities_and_choices_come_through(cluster: Cluster) -> None:
    events = cluster.submit("scored", PROMPTS[0], max_tokens=4, logprobs=2, n=2, temperature=0.7, seed=1)
    outputs = []
    while sum(output.finish_reason is not None for output in outputs) < 2:
        outputs.append(events.get(timeout=60))
        assert isinstance(outputs[-1], StepOutput), outputs[-1]
    assert {output.choice for output in outputs} == {0, 1}
    for output in outputs:
        assert [score.token for score in output.logprobs or ()] == list(output.tokens)
        assert all(len(score.top) == 2 for score in output.logprobs or ())


def test_what_the_engine_cannot_do_is_refused(cluster: Cluster) -> None:
    with pytest.raises(InvalidRequest, match="prompt_logprobs"):
        collect(cluster.submit("p", PROMPTS[0], prompt_logprobs=1), [])
    with pytest.raises(InvalidRequest, match="not loaded here"):
        cluster.client.validate(Request("m", PROMPTS[0], SamplingParams(), SpeculationParams(method="eagle")))


def test_streams_of_a_killed_server_continue_on_the_other(cluster: Cluster) -> None:
    length, processes = 120, _processes(cluster.servers[1].popen.pid)
    expected = [collect(cluster.submit(f"e{i}", prompt, max_tokens=length), []) for i, prompt in enumerate(PROMPTS)]
    streams = [
        (i, cluster.submit(f"s{i}{j}", prompt, max_tokens=length)) for j in range(4) for i, prompt in enumerate(PROMPTS)
    ]
    texts: list[list[int]] = [[] for _ in streams]
    collect(streams[0][1], texts[0], until=2)  # the others have just begun
    for pid in processes:
        os.kill(pid, signal.SIGKILL)
    for (_, events), tokens in zip(streams, texts, strict=True):
        collect(events, tokens, until=length)
    assert texts == [expected[i] for i, _ in streams]
    assert cluster.client.cluster_status().continued > 0


def _processes(pid: int) -> list[int]:
    """The server and its engine process."""
    children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split()
    return [pid, *map(int, children)]


def test_a_server_of_another_model_is_refused(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "load_tokenizer", lambda model: letters())
    with pytest.raises(InvalidConfig, match="the pool's `model`"):
        workers_of(config_of([cluster.servers[0].url]))

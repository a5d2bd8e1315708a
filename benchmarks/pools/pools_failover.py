"""Two targets and two drafts, `kill -9` of one of each under load: every text must be that of plain decoding.

    python benchmarks/pools/pools_failover.py            # processes
    python benchmarks/pools/pools_failover.py --ray      # a local Ray cluster of two virtual nodes

Half of the streams are greedy and half sampled at temperature 1 with a seed. The reference is plain decoding in this
process.
"""

import argparse
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from paceline.core.cluster_config import ClusterConfig, cluster_config
from paceline.core.config import EngineConfig
from paceline.core.errors import PacelineError
from paceline.core.output import StepOutput
from paceline.core.request import Request, SamplingParams, SpeculationParams
from paceline.deploy.deployment import process_specs
from paceline.deploy.processes.supervisor import Supervisor
from paceline.engine.start.build import build_engine
from paceline.model_files.tokenizer.tokenizer import Tokenizer
from paceline.models.loading.load import open_checkpoint
from paceline.targets.client import TargetClient
from paceline.tools.prompts.prompts import DEFAULT_PROMPTS
from paceline.wire.worker_spec import Directory, FixedDirectory

Tokens = dict[str, list[int]]
Kill = Callable[[str], None]
LIMITS = {"max_num_seqs": 64, "max_batched_tokens": 256, "max_model_len": 512, "kv_tokens": 16384}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", default="smollm2")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--ray", action="store_true")
    options = parser.parse_args()
    requests = make_requests(options.model, options.streams, options.tokens)
    expected = plain(options.model, requests)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        settings = config(options.model, options.draft, Path(folder))
        where = on_ray(settings) if options.ray else as_processes(settings, Path(folder))
        with where as (directory, kill), TargetClient(settings, directory) as llm:
            for killed in ((), ("draft-0", "target-0"), ()):
                wait_for(llm)
                rows.append(run(llm, requests, expected, killed, kill))
    print(
        f"{options.model} with draft {options.draft}, {options.streams} streams of {options.tokens} tokens, half seeded"
    )
    print(
        "| killed | streams | continued on another worker | longest pause | seconds | accepted / drafted | different |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(row)


def config(model: str, draft: str, folder: Path) -> ClusterConfig:
    pool = {"replicas": 2, "devices": ["cpu"], "limits": LIMITS}
    speculation = {"depth": "fixed", "max_depth": 3}
    return cluster_config(
        {
            "name": "failover",
            "state_dir": str(folder),
            "pools": [
                {"name": "target", "role": "target", "model": model, "speculation": speculation, **pool},
                {"name": "draft", "role": "draft", "model": draft, "placement": {"with": "target"}, **pool},
            ],
        }
    )


def make_requests(model: str, count: int, max_tokens: int) -> list[Request]:
    tokenizer: Tokenizer = open_checkpoint(model).read_tokenizer()
    made = []
    for i in range(count):
        prompt = DEFAULT_PROMPTS[i % len(DEFAULT_PROMPTS)].turns[0]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=float(i % 2), seed=i, ignore_eos=True)
        made.append(Request(f"r{i}", tuple(tokenizer.encode(prompt)), sampling))
    return made


def plain(model: str, requests: list[Request]) -> Tokens:
    engine = build_engine(EngineConfig(model=model, device="cpu", **LIMITS))  # type: ignore[arg-type]
    tokens: Tokens = {request.id: [] for request in requests}
    for request in requests:
        engine.add(engine.validate(replace(request, speculation=SpeculationParams(enabled=False))))
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.tokens
    return tokens


def run(llm: TargetClient, requests: list[Request], expected: Tokens, killed: tuple[str, ...], kill: Kill) -> str:
    """One load; workers are killed at one third and two thirds of the tokens."""
    events: SimpleQueue[StepOutput | PacelineError] = SimpleQueue()
    tokens: Tokens = {request.id: [] for request in requests}
    continued, started = llm.pool.num_continued, time.perf_counter()
    last = dict.fromkeys(tokens, started)
    pause = drafted = accepted = 0.0
    total, done, unfinished = sum(map(len, expected.values())), 0, len(requests)
    left = list(killed)
    for request in requests:
        llm.submit(llm.validate(request), events.put)
    while unfinished:
        event = events.get()
        if isinstance(event, PacelineError):
            raise event
        now = time.perf_counter()
        if tokens[event.request_id]:
            pause = max(pause, now - last[event.request_id])
        last[event.request_id] = now
        tokens[event.request_id] += event.tokens
        drafted += event.drafted
        accepted += event.accepted
        done += len(event.tokens)
        unfinished -= event.finish_reason is not None
        if left and done > total * (1 + len(killed) - len(left)) / (1 + len(killed)):
            kill(left.pop(0))
    seconds = time.perf_counter() - started
    differ = sum(tokens[name] != expected[name] for name in expected)
    return (
        f"| {', '.join(killed) or 'none'} | {len(requests)} | {llm.pool.num_continued - continued} | {pause:.1f} s "
        f"| {seconds:.1f} | {accepted:.0f} / {drafted:.0f} | {differ} |"
    )


def wait_for(llm: TargetClient) -> None:
    while not (len(llm.pool.workers()) == 4 and all(worker.state == "ready" for worker in llm.pool.workers())):
        time.sleep(0.1)


@contextmanager
def as_processes(settings: ClusterConfig, folder: Path) -> Iterator[tuple[Directory, Kill]]:
    specs, stop = process_specs(settings), threading.Event()
    supervisor = Supervisor(specs, folder / "logs")
    supervisor.start()
    thread = threading.Thread(target=supervisor.run, args=(stop,))
    thread.start()
    try:
        directory = FixedDirectory(tuple(spec.member(spec.address) for spec in specs))
        yield directory, lambda name: os.kill(supervisor.pids[name], signal.SIGKILL)
    finally:
        stop.set()
        thread.join()


@contextmanager
def on_ray(settings: ClusterConfig) -> Iterator[tuple[Directory, Kill]]:
    import ray
    from ray.cluster_utils import Cluster

    from paceline.deploy.ray.deployment import RayDeployment

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    try:
        settings = replace(settings, ray=cluster.address)
        deployment = RayDeployment.up(settings)
        pids = deployment.pids()
        yield deployment, lambda name: os.kill(pids[name][0], signal.SIGKILL)
        RayDeployment.down(settings)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()

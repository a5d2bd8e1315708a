"""A long prompt arrives while streams decode: one target and one prefill worker, compared with two targets.

    python benchmarks/routing/handoff.py [--prompt 2048] [--streams 4] [--turns 3] [--chunk 512]

Both deployments use the embedded model with one thread per process, and alternate. In each turn `streams` short
requests start to decode, then a new long prompt arrives, and all requests run to the end. Measured are the time to
the first token of the long prompt, and the times between tokens of the streams until then. The same turns without the
long prompt run first. Texts must be the same.
"""

import argparse
import contextlib
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from paceline.core.cluster_config import cluster_config
from paceline.core.errors import PacelineError
from paceline.core.output import StepOutput
from paceline.core.request import Request, SamplingParams, SpeculationParams
from paceline.deploy.deployment import running_processes
from paceline.deploy.processes.state import StateFolder
from paceline.targets.client import TargetClient

DEPLOYMENTS = ("two targets", "prefill worker")
VOCABULARY, SHORT = 49_152, 24
WARM = 4
"""Tokens of every stream before the long prompt arrives."""


@dataclass(slots=True)
class Received:
    """The outputs of one request and their times."""

    sent: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    warm: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    error: PacelineError | None = None

    def on_event(self, event: StepOutput | PacelineError) -> None:
        if isinstance(event, PacelineError):
            self.error = event
            self.warm.set()
            self.over.set()
            return
        self.times.extend([time.perf_counter()] * len(event.tokens))
        self.tokens.extend(event.tokens)
        if len(self.tokens) >= WARM:
            self.warm.set()
        if event.finish_reason is not None:
            self.over.set()


@dataclass(slots=True)
class Result:
    first: list[float] = field(default_factory=list)
    """Seconds to the first token of the long prompts."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between tokens of the streams during the prefill of a long prompt."""
    calm: list[float] = field(default_factory=list)
    """The same without a long prompt."""
    texts: list[list[int]] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the long prompt")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=160, help="tokens per stream")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=512, help="most tokens of a pass, and so the chunk of a prompt")
    options = parser.parse_args()
    results = {name: Result() for name in DEPLOYMENTS}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        llms = {
            name: stack.enter_context(cluster(name, folder / name.replace(" ", "-"), options)) for name in DEPLOYMENTS
        }
        print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
        for turn in range(-1, options.turns):  # the first turn is a warm-up
            for name in DEPLOYMENTS if turn % 2 else reversed(DEPLOYMENTS):
                result = Result() if turn < 0 else results[name]
                generator = random.Random(turn)  # same prompts for both
                play(llms[name], f"{name}-calm-{turn}", generator, options, result, disturb=False)
                play(llms[name], f"{name}-{turn}", generator, options, result, disturb=True)
        handoffs = [worker.handoffs for worker in llms["prefill worker"].pool.workers() if worker.role == "target"]
    if results["two targets"].texts != results["prefill worker"].texts:
        raise SystemExit("the texts differ")
    report(results)
    print(f"hand-offs: {handoffs[0]}")


@contextlib.contextmanager
def cluster(name: str, folder: Path, options: argparse.Namespace) -> Iterator[TargetClient]:
    limits = {
        "max_num_seqs": 16,
        "max_batched_tokens": options.chunk,
        "max_model_len": options.prompt + 256,
        "kv_tokens": 4 * options.prompt + 4096,
    }
    common = {"model": "smollm2", "devices": ["cpu"], "limits": limits}
    pools = [{"name": "target", "role": "target", "replicas": 2 if name == "two targets" else 1, **common}]
    if name == "prefill worker":
        pools.append({"name": "prefill", "role": "prefill", **common})
    settings = cluster_config(
        {"name": folder.name, "state_dir": str(folder), "health": {"canary": 0.0}, "pools": pools}
    )
    with running_processes(settings, StateFolder.of(settings)) as directory, TargetClient(settings, directory) as llm:
        while len(llm.pool.workers()) < 2 or any(worker.state != "ready" for worker in llm.pool.workers()):
            time.sleep(0.1)
        yield llm


def play(
    llm: TargetClient, name: str, generator: random.Random, options: argparse.Namespace, result: Result, disturb: bool
) -> None:
    streams = [submit(llm, f"{name}-{i}", ids(generator, SHORT), options.tokens) for i in range(options.streams)]
    for stream in streams:
        stream.warm.wait()
    since = time.perf_counter()
    long = submit(llm, f"{name}-long", ids(generator, options.prompt), 8) if disturb else None
    requests = [*streams, *([long] if long is not None else [])]
    for request in requests:
        request.over.wait()
        if request.error is not None:
            raise request.error
    result.texts.extend(request.tokens for request in requests)
    if long is None:
        result.calm.extend(gap for stream in streams for gap in gaps(stream, since, stream.times[-1]))
        return
    result.first.append(long.times[0] - long.sent)
    result.gaps.extend(gap for stream in streams for gap in gaps(stream, since, long.times[0]))


def submit(llm: TargetClient, name: str, prompt: tuple[int, ...], tokens: int) -> Received:
    received = Received(time.perf_counter())
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, seed=0, ignore_eos=True)
    llm.submit(llm.validate(Request(name, prompt, sampling, SpeculationParams(enabled=False))), received.on_event)
    return received


def ids(generator: random.Random, count: int) -> tuple[int, ...]:
    return tuple(generator.randrange(1000, VOCABULARY) for _ in range(count))


def gaps(stream: Received, since: float, until: float) -> list[float]:
    """Times between tokens that overlap the interval."""
    times = stream.times
    return [b - a for a, b in pairwise(times) if b > since and a < until]


def report(results: dict[str, Result]) -> None:
    print(
        "\n| deployment | TTFT of the long prompt | time between tokens p50 | p99 | longest | p50 without the prompt |"
    )
    print("|---|---|---|---|---|---|")
    for name, result in results.items():
        print(
            f"| {name} | {statistics.median(result.first):.2f} s | {share(result.gaps, 0.5)} | {share(result.gaps, 0.99)} "
            f"| {share(result.gaps, 1.0)} | {share(result.calm, 0.5)} |"
        )
    both, split = results["two targets"], results["prefill worker"]
    ratio = statistics.median(both.first) / statistics.median(split.first)
    print(
        f"\ntwo targets / prefill worker: TTFT {ratio:.2f}, longest time between tokens {max(both.gaps) / max(split.gaps):.2f}"
    )


def share(values: Sequence[float], part: float) -> str:
    ordered = sorted(values)
    return f"{1e3 * ordered[min(len(ordered) - 1, int(part * len(ordered)))]:.0f} ms"


if __name__ == "__main__":
    main()

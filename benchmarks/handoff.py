"""A long prompt arrives while streams are running: prefill and decode apart, against the same two processes whole.

    python benchmarks/handoff.py [--prompt 2048] [--streams 4] [--turns 3] [--chunk 512]

*Whole* is two target workers. *Apart* is one target and one prefill worker. Both have the embedded model and one thread a
process, and take turns: in each turn `streams` short requests begin to decode, then one with a long prompt that nobody has seen
comes, and all are answered to the end. Measured are the time to the first token of the long prompt, and the times between two
tokens of the streams that were running when it came, from its arrival to its first token. The same turns without the long
prompt come first, as what the streams have when nobody disturbs them. Texts must be the same.
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
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.core.speculation import SpeculationParams
from paceline.runtime.deploy.deployment import running_processes
from paceline.runtime.deploy.state import StateFolder
from paceline.runtime.gateway_client.cluster_target import ClusterTarget

WAYS = ("whole", "apart")
VOCABULARY, SHORT = 49_152, 24
WARM = 4
"""Tokens that every stream has before the long prompt comes."""


@dataclass(slots=True)
class Heard:
    """One request's outputs and when they came."""

    asked: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    warm: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    error: PacelineError | None = None

    def listen(self, event: StepOutput | PacelineError) -> None:
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
    """Between tokens of the streams, while a long prompt was computed."""
    calm: list[float] = field(default_factory=list)
    """The same without one."""
    texts: list[list[int]] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the long prompt")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=160, help="that each stream generates")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--chunk", type=int, default=512, help="rows of a pass: how much of a prompt is computed at a time"
    )
    options = parser.parse_args()
    results = {way: Result() for way in WAYS}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        llms = {way: stack.enter_context(cluster(way, folder / way, options)) for way in WAYS}
        print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
        for turn in range(-1, options.turns):  # the first is not counted
            for way in WAYS if turn % 2 else reversed(WAYS):
                result = Result() if turn < 0 else results[way]
                generator = random.Random(turn)  # the same for both
                play(llms[way], f"{way}-calm-{turn}", generator, options, result, disturb=False)
                play(llms[way], f"{way}-{turn}", generator, options, result, disturb=True)
        handed = [worker.handoffs for worker in llms["apart"].workers() if worker.role == "target"]
    if results["whole"].texts != results["apart"].texts:
        raise SystemExit("the texts differ")
    report(results)
    print(f"handed over: {handed[0]}")


@contextlib.contextmanager
def cluster(way: str, folder: Path, options: argparse.Namespace) -> Iterator[ClusterTarget]:
    limits = {
        "max_num_seqs": 16,
        "max_batched_tokens": options.chunk,
        "max_model_len": options.prompt + 256,
        "kv_tokens": 4 * options.prompt + 4096,
    }
    common = {"model": "smollm2", "devices": ["cpu"], "limits": limits}
    pools = [{"name": "target", "role": "target", "replicas": 2 if way == "whole" else 1, **common}]
    if way == "apart":
        pools.append({"name": "prefill", "role": "prefill", **common})
    settings = cluster_config({"name": way, "state_dir": str(folder), "health": {"canary": 0.0}, "pools": pools})
    with running_processes(settings, StateFolder.of(settings)) as directory, ClusterTarget(settings, directory) as llm:
        while len(llm.pool.workers()) < 2 or any(worker.state != "ready" for worker in llm.pool.workers()):
            time.sleep(0.1)
        yield llm


def play(
    llm: ClusterTarget, name: str, generator: random.Random, options: argparse.Namespace, result: Result, disturb: bool
) -> None:
    streams = [submit(llm, f"{name}-{i}", ids(generator, SHORT), options.tokens) for i in range(options.streams)]
    for stream in streams:
        stream.warm.wait()
    since = time.perf_counter()
    long = submit(llm, f"{name}-long", ids(generator, options.prompt), 8) if disturb else None
    everybody = [*streams, *([long] if long is not None else [])]
    for one in everybody:
        one.over.wait()
        if one.error is not None:
            raise one.error
    result.texts.extend(one.tokens for one in everybody)
    if long is None:
        result.calm.extend(gap for stream in streams for gap in gaps(stream, since, stream.times[-1]))
        return
    result.first.append(long.times[0] - long.asked)
    result.gaps.extend(gap for stream in streams for gap in gaps(stream, since, long.times[0]))


def submit(llm: ClusterTarget, name: str, prompt: tuple[int, ...], tokens: int) -> Heard:
    heard = Heard(time.perf_counter())
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, seed=0, ignore_eos=True)
    llm.pool.submit(Request(name, prompt, sampling, SpeculationParams(enabled=False)), heard.listen)
    return heard


def ids(generator: random.Random, count: int) -> tuple[int, ...]:
    return tuple(generator.randrange(1000, VOCABULARY) for _ in range(count))


def gaps(stream: Heard, since: float, until: float) -> list[float]:
    """Waits for a token that ended, or were still going on, in that time."""
    times = stream.times
    return [b - a for a, b in pairwise(times) if b > since and a < until]


def report(results: dict[str, Result]) -> None:
    print("\n| | TTFT of the long prompt | token to token p50 | p99 | longest | undisturbed p50 |")
    print("|---|---|---|---|---|---|")
    for way, result in results.items():
        print(
            f"| {way} | {statistics.median(result.first):.2f} s | {share(result.gaps, 0.5)} | {share(result.gaps, 0.99)} "
            f"| {share(result.gaps, 1.0)} | {share(result.calm, 0.5)} |"
        )
    whole, apart = results["whole"], results["apart"]
    ratio = statistics.median(whole.first) / statistics.median(apart.first)
    print(
        f"\nTTFT whole / apart: {ratio:.2f}; longest wait for a token whole / apart: {max(whole.gaps) / max(apart.gaps):.2f}"
    )


def share(values: Sequence[float], part: float) -> str:
    ordered = sorted(values)
    return f"{1e3 * ordered[min(len(ordered) - 1, int(part * len(ordered)))]:.0f} ms"


if __name__ == "__main__":
    main()

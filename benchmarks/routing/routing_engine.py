"""Time to the first token by router: four workers whose caches hold 3 of 8 system prompts each.

    python benchmarks/routing/routing_engine.py [--turns 3] [--requests 24] [--clients 2] [--plot docs/routing.png]

Every router has four new worker processes with one thread each and the embedded model. A request is one of 8 system
prompts of 1,500 tokens, chosen at random, and a question of 30; 8 tokens are generated. All routers receive the same
requests in the same order, in turns. Every client sends its next request after an answer. Texts must be the same.

Before the first turn every worker computes one other prompt. The first table includes the first request of each
system prompt; the second table leaves the first turn out.
"""

import argparse
import contextlib
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from paceline.core.cluster_config import ClusterConfig, cluster_config
from paceline.core.errors import PacelineError
from paceline.core.output import StepOutput
from paceline.core.request import Request, SamplingParams, SpeculationParams
from paceline.deploy.deployment import running_processes
from paceline.deploy.processes.state import StateFolder
from paceline.targets.client import TargetClient

WORKERS, PROMPTS, HELD = 4, 8, 3
SYSTEM, QUESTION, ANSWER, VOCABULARY = 1500, 30, 8, 49_152
BLOCK = 16
ROOM = 24
"""Blocks of a cache for questions and answers."""
KV_TOKENS = (HELD * -(-SYSTEM // BLOCK) + ROOM) * BLOCK
HIT = 0.9
"""Share of the system prompt in the cache that counts as a hit."""
ROUTERS = ("round_robin", "least_loaded", "kv_aware")


@dataclass(slots=True)
class Outcome:
    """One request; times in seconds."""

    turn: int
    sent: float
    first: float | None = None
    """Time to the first token."""
    cached: int = 0
    tokens: list[int] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, default=24, help="of one turn")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--plot", type=Path, help="a PNG to write")
    options = parser.parse_args()
    outcomes: dict[str, list[Outcome]] = {router: [] for router in options.routers}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        llms = {router: stack.enter_context(cluster(router, folder / router)) for router in options.routers}
        cold = statistics.median(took for router, llm in llms.items() for took in warm(llm, router))
        print(f"a cold prompt takes {cold:.2f} s; load average {os.getloadavg()[0]:.1f}", flush=True)
        generator = random.Random(options.seed)
        systems = [ids(generator, SYSTEM) for _ in range(PROMPTS)]
        for turn in range(options.turns):
            requests = [
                request(f"{turn}-{i}", generator.choice(systems) + ids(generator, QUESTION))
                for i in range(options.requests)
            ]
            for router, llm in llms.items():
                started = time.perf_counter()
                those = run(llm, requests, options.clients, turn)
                outcomes[router] += those
                seconds, hits, load = time.perf_counter() - started, sum(map(is_hit, those)), os.getloadavg()[0]
                print(f"turn {turn + 1}, {router}: {hits} hits, {seconds:.0f} s, load average {load:.1f}", flush=True)
    texts = {tuple(tuple(outcome.tokens) for outcome in those) for those in outcomes.values()}
    assert len(texts) == 1, "texts differ between routers"
    show("All requests", outcomes, first_turn=0)
    if options.turns > 1:
        show("Without the first turn", outcomes, first_turn=1)
    if options.plot:
        plot(options.plot, outcomes)


def settings(router: str, folder: Path) -> ClusterConfig:
    limits = {"max_num_seqs": 8, "max_model_len": 2048, "kv_tokens": KV_TOKENS}
    pool = {"name": "target", "role": "target", "model": "smollm2", "replicas": WORKERS, "devices": ["cpu"]}
    return cluster_config(
        {
            "name": router,
            "router": router,
            "state_dir": str(folder),
            "health": {"canary": 0.0, "misses": 1000},
            "pools": [pool | {"limits": limits}],
        }
    )


@contextlib.contextmanager
def cluster(router: str, folder: Path) -> Iterator[TargetClient]:
    config = settings(router, folder)
    with running_processes(config, StateFolder.of(config)) as directory, TargetClient(config, directory) as llm:
        while not all(worker.state == "ready" for worker in llm.pool.workers()):
            time.sleep(0.1)
        yield llm


def ids(generator: random.Random, count: int) -> tuple[int, ...]:
    return tuple(generator.choices(range(VOCABULARY), k=count))


def request(name: str, prompt: tuple[int, ...]) -> Request:
    sampling = SamplingParams(max_tokens=ANSWER, temperature=0.0, seed=0, ignore_eos=True)
    return Request(name, prompt, sampling, SpeculationParams(enabled=False))


def warm(llm: TargetClient, router: str) -> list[float]:
    """Median time of a prompt without cached blocks, once on each worker."""
    taken = []
    for i in range(WORKERS):
        prompt = ids(random.Random(1000 + i), SYSTEM + QUESTION)
        [outcome] = run(llm, [request(f"warm-{i}", prompt)], 1, 0)
        assert outcome.first is not None
        assert not outcome.cached, f"{router}: not cold"
        taken.append(outcome.first)
    return taken


def run(llm: TargetClient, requests: Sequence[Request], clients: int, turn: int) -> list[Outcome]:
    """Run the requests in order with `clients` clients."""
    events: SimpleQueue[tuple[float, StepOutput | PacelineError]] = SimpleQueue()
    outcomes: dict[str, Outcome] = {}
    unfinished = 0
    while unfinished or len(outcomes) < len(requests):
        while unfinished < clients and len(outcomes) < len(requests):
            request = requests[len(outcomes)]
            outcomes[request.id] = Outcome(turn, time.perf_counter())
            llm.submit(llm.validate(request), lambda event: events.put((time.perf_counter(), event)))
            unfinished += 1
        now, event = events.get()
        if isinstance(event, PacelineError):
            raise event
        outcome = outcomes[event.request_id]
        if outcome.first is None and event.tokens:
            outcome.first, outcome.cached = now - outcome.sent, event.num_cached
        outcome.tokens += event.tokens
        unfinished -= event.finish_reason is not None
    return list(outcomes.values())


def is_hit(outcome: Outcome) -> bool:
    return outcome.cached >= HIT * SYSTEM


def show(title: str, outcomes: dict[str, list[Outcome]], first_turn: int) -> None:
    print(
        f"\n{title}\n\n| router | requests | hits | prompt tokens cached | p50 TTFT s | p99 TTFT s | p50 / kv_aware |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    medians = {}
    rows = []
    for router, those in outcomes.items():
        those = [outcome for outcome in those if outcome.turn >= first_turn]
        firsts = [outcome.first for outcome in those if outcome.first is not None]
        hits = sum(map(is_hit, those))
        cached = sum(outcome.cached for outcome in those) / (len(those) * (SYSTEM + QUESTION))
        medians[router], late = statistics.median(firsts), statistics.quantiles(firsts, n=100, method="inclusive")[98]
        rows.append((router, f"{len(those)} | {hits / len(those):.0%} | {cached:.0%}", medians[router], late))
    reference = medians.get("kv_aware", math.nan)
    for router, counts, median, late in rows:
        print(f"| {router} | {counts} | {median:.2f} | {late:.2f} | {median / reference:.1f}x |")


def plot(path: Path, outcomes: dict[str, list[Outcome]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for (router, those), colour in zip(outcomes.items(), ("#9aa5b1", "#d9822b", "#1f6feb"), strict=False):
        firsts = sorted(outcome.first for outcome in those if outcome.first is not None)
        shares = [100 * (i + 1) / len(firsts) for i in range(len(firsts))]
        axes.step(firsts, shares, where="post", label=router, color=colour, linewidth=2)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("time to the first token, seconds")
    axes.set_ylabel("requests with a first token, %")
    axes.set_title(f"{WORKERS} workers, each holding {HELD} of {PROMPTS} system prompts", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    main()

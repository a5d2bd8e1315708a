"""The plugin against a model of vLLM's steps on an H200, without vLLM and without a GPU.

    python benchmarks/vllm_replay.py
    python benchmarks/vllm_replay.py --method suffix --sizes 32,64 --rounds 2

Lookups, depth policy and the rest of the plugin are the real ones. Their time counts as measured, times `--host`; the time of
vLLM's steps is computed. Texts are random with copies of earlier parts. New prompts are decoded once, repeated ones again. A
figure is the throughput of a whole run over that of plain decoding without async scheduling, as in vllm_plugin.py.
"""

import argparse
import random
import time
from dataclasses import dataclass

import numpy as np

from paceline.vllm.batch import Batch
from paceline.vllm.decisions.lookup_time import LookupTime
from paceline.vllm.drafting import DraftLoop
from paceline.vllm.proposers import METHOD, Lookups, depth_policy

DEPTH = 4
VOCABULARY = 32_000
PROMPT, TOKENS = 300, 96
MAX_PROMPTS = 8192 // PROMPT
"""Prompts that a step computes, with vLLM's default limit of batched tokens."""
PREFILL_SECONDS = 27e-6
"""Per prompt token, 8B shape."""


class HostClock:
    """Time of the host, times a factor, and the computed time of vLLM's steps."""

    def __init__(self, factor: float) -> None:
        self._factor, self._added, self._paused_at = factor, 0.0, time.thread_time()
        self._skipped = 0.0

    def now(self) -> float:
        return (time.thread_time() - self._skipped) * self._factor + self._added

    def advance(self, seconds: float) -> None:
        self._added += seconds

    def pause(self) -> None:
        """The host's time does not count until `resume`."""
        self._paused_at = time.thread_time()

    def resume(self) -> None:
        self._skipped += time.thread_time() - self._paused_at


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds of vLLM's steps with complete CUDA graphs."""

    weights: float = 6.0e-3
    sequence: float = 0.015e-3
    row: float = 0.01e-3
    """Per row above `free_rows`: the pass is then limited by arithmetic."""
    free_rows: int = 128
    drafts: float = 2.2e-3
    """Copies and rejection sampling of a step with drafts."""

    def plain(self, batch: int) -> float:
        return self.weights + self.sequence * batch

    def step(self, counts: list[int]) -> float:
        """`counts`: drafts of each sequence."""
        batch, rows = len(counts), len(counts) + sum(counts)
        return self.plain(batch) + self.row * max(0, rows - self.free_rows) + (self.drafts if rows > batch else 0.0)


def text(generator: random.Random) -> list[int]:
    """A prompt and an output, a part of which copies what was there before; some outputs do so much more than others."""
    tokens = [min(VOCABULARY - 1, int(generator.paretovariate(0.6))) for _ in range(PROMPT)]
    copies = generator.choice((0.1, 0.15, 0.3, 0.5, 0.8))
    while len(tokens) < PROMPT + TOKENS + DEPTH + 1:
        if generator.random() < copies:
            start = generator.randrange(len(tokens) - 12)
            tokens += tokens[start : start + generator.randrange(6, 13)]
        else:
            tokens.append(min(VOCABULARY - 1, int(generator.paretovariate(0.6))))
    return tokens


def run(loop: DraftLoop, clock: HostClock, model: StepModel, texts: list[list[int]]) -> float:
    """Seconds in which all texts are decoded."""
    clock.pause()
    ids = np.zeros((len(texts), PROMPT + TOKENS + 2 * DEPTH), dtype=np.int32)
    for i, one in enumerate(texts):
        ids[i, : PROMPT + TOKENS] = one[: PROMPT + TOKENS]
    lengths, drafts, waiting = [PROMPT] * len(texts), dict[int, list[int]](), list(range(len(texts)))
    running, waiting = waiting[:MAX_PROMPTS], waiting[MAX_PROMPTS:]
    started, seconds = clock.now(), PREFILL_SECONDS * PROMPT * len(running)
    clock.resume()
    while running:
        clock.pause()
        sampled = []
        for i in running:
            draft, position = drafts.get(i, []), lengths[i]
            accepted = 0
            while accepted < len(draft) and draft[accepted] == texts[i][position + accepted]:
                accepted += 1
            tokens = texts[i][position : min(position + accepted + 1, PROMPT + TOKENS)]
            lengths[i] += len(tokens)
            sampled.append(tokens)
        clock.advance(seconds)
        batch = Batch(sampled, np.array([lengths[i] for i in running], dtype=np.int32), ids[running])
        clock.resume()
        found = loop.propose(batch)
        clock.pause()
        drafts = dict(zip(running, found, strict=True))
        running = [i for i in running if lengths[i] < PROMPT + TOKENS]
        joining, waiting = waiting[:MAX_PROMPTS], waiting[MAX_PROMPTS:]
        seconds = model.step([len(drafts[i]) for i in running]) + PREFILL_SECONDS * PROMPT * len(joining)
        running += joining
        clock.resume()
    return clock.now() - started


def plain_seconds(model: StepModel, batch: int) -> float:
    """Without drafts. Sequences that join later end later."""
    sizes = [min(batch, MAX_PROMPTS * (i + 1)) for i in range(-(-batch // MAX_PROMPTS))]
    ramp = sum(model.plain(size) + model.plain(batch - size) for size in sizes[:-1])
    return PREFILL_SECONDS * PROMPT * batch + ramp + (TOKENS - len(sizes)) * model.plain(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,8,32,64")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--host", type=float, default=1.0, help="time of the GPU's host over that of this machine")
    parser.add_argument("--method", choices=("combined", "suffix", "ngram"), default="combined")
    options = parser.parse_args()
    model, clock = StepModel(), HostClock(options.host)
    lookups = Lookups.of(options.method)
    lookup_time = LookupTime.measure(Lookups.of(options.method).proposer({}, clock), clock, DEPTH)
    proposer, policy = lookups.proposer({}, clock), depth_policy("goodput", DEPTH, lookup_time)
    loop = DraftLoop(METHOD, proposer, policy, DEPTH, VOCABULARY, clock, lookup_time, lookups.keep)
    sizes = [int(size) for size in options.sizes.split(",")]
    generator = random.Random(0)
    for size in sizes:  # the warm-up
        run(loop, clock, model, [text(generator) for _ in range(size)])
    print("| prompts | sequences | / plain_sync | steps | drafted | accepted |\n|---|---|---|---|---|---|")
    for _ in range(options.rounds):
        used = {size: [text(generator) for _ in range(size)] for size in sizes}
        for group in ("new", "repeated"):
            for size in sizes:
                before = loop.num_steps, loop.num_drafted, loop.num_accepted
                ratio = plain_seconds(model, size) / run(loop, clock, model, used[size])
                after = loop.num_steps, loop.num_drafted, loop.num_accepted
                counts = " | ".join(str(b - a) for a, b in zip(before, after, strict=True))
                print(f"| {group} | {size} | {ratio:.2f} | {counts} |", flush=True)


if __name__ == "__main__":
    main()

"""Python time of a step on the host, with a fake device that takes no time: plain and drafted steps, steps full of prompts, and
continuous load, without drafts (served) and with them (joined).

    python -m benchmarks.engine.host_time

Run from the root of the repository; no GPU is needed. Engine, scheduler, policy, drafter and text are real. The last
columns are the number and the longest time of full garbage collections.
"""

import argparse
import gc
import random
import time
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from tests.fakes import TINY, tiny_engine, tiny_model
from tests.specs import changed

from paceline.core.clock import WallClock
from paceline.core.machine import freeze_loaded_objects
from paceline.core.request import Request, SamplingParams, SpeculationFlags
from paceline.engine.engine import Engine
from paceline.engine.graph import mixed as mixed_steps
from paceline.engine.graph.batch import GraphBatch
from paceline.engine.graph.inflight import InflightStep, SlotResults
from paceline.kernels.cpu import native
from paceline.kernels.gpu.speculation.accept import Accepted
from paceline.models.decoder.decoder import ForwardOutput
from paceline.models.decoder.forward import DecoderModel
from paceline.models.loading.load import open_checkpoint
from paceline.models.runner.gpu import mixed as gpu_mixed
from paceline.models.runner.gpu import ragged as gpu_ragged
from paceline.models.runner.gpu import workspace as gpu_workspace
from paceline.models.runner.gpu.runner import GpuRunner
from paceline.policy.depth.allocation import PaddedBatch
from paceline.policy.depth.goodput import GoodputDepth
from paceline.policy.step import padded_size
from paceline.speculation.proposers.model.draft_model import DraftModelProposer

SHAPE = changed(TINY, num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1, vocab_size=1024, max_position=2048)
ROWS, WORDS = 2048, range(300, 700)
PASS, ROW = 4e-3, 1e-6
"""Reported seconds of a pass and of each row."""


class FakeDevice:
    """Computes nothing: every other sequence accepts all drafts, and tokens are words."""

    def __init__(self, draft_seconds: float) -> None:
        self._draft_seconds, self._wait = draft_seconds, InflightStep.wait
        self._logits = torch.eye(SHAPE.vocab_size)[torch.arange(ROWS) % len(WORDS) + WORDS[0]]

    def graph(self, batch: GraphBatch, part: str, shape: Any, keeps: bool = False) -> "FakeDevice":
        if part == "accept":
            round_ = batch._round(shape)
            round_.report[0] = batch._limits
            round_.report[0, 1::2] = 0
            round_.path.tokens[:] = WORDS[0]
        return self

    def replay(self) -> None: ...

    def wait(self, step: InflightStep) -> SlotResults:
        drafted, rows = self._draft_seconds * step.shape.levels, len(step.limits) * (1 + step.shape.nodes)
        return replace(self._wait(step), draft_seconds=drafted, forward_seconds=PASS + ROW * rows)

    def draft_seconds(self, step: mixed_steps.InflightMixed) -> float:
        return self._draft_seconds * step.shape.levels

    def forward(self, model: Any, tokens: torch.Tensor, *args: Any, **options: Any) -> ForwardOutput:
        """Signature of `gpu_forward` and `DecoderModel.forward`."""
        last_hidden = args[5] if len(args) > 5 else options.get("last_hidden")
        states = torch.zeros(len(tokens), SHAPE.hidden_size) if last_hidden else None
        return ForwardOutput(None if args[3] is None else self.head(model, args[3]), states, {})

    def head(self, model: Any, wanted: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(wanted)]

    def sample(self, logits: torch.Tensor, *args: Any) -> torch.Tensor:
        return torch.full((len(logits),), WORDS[0])

    def accept(
        self, drafts: torch.Tensor, picks: torch.Tensor, limits: torch.Tensor, *args: Any, slots: torch.Tensor
    ) -> Accepted:
        """Signature of `accept_chains`."""
        counts = limits[slots]
        counts[1::2] = 0
        is_committed = torch.arange(picks.shape[1]) <= counts[:, None]
        return Accepted(counts, torch.where(is_committed, WORDS[0], -1))

    def installed(self) -> ExitStack:
        stack = ExitStack()
        for owner, name, fake in (
            (native, "library", lambda: None),
            (GraphBatch, "_graph", lambda batch, *args: self.graph(batch, *args)),
            (InflightStep, "wait", lambda step: self.wait(step)),
            (mixed_steps.InflightMixed, "draft_seconds", property(self.draft_seconds)),
            (gpu_workspace, "gpu_forward", self.forward),
            (gpu_ragged, "head_logits", self.head),
            (gpu_mixed, "place_slots", lambda *args: None),
            (mixed_steps, "sample", self.sample),
            (mixed_steps, "commit_rows", lambda *args, **options: None),
            (mixed_steps, "accept_chains", self.accept),
            (DecoderModel, "forward", lambda model, *args, **options: self.forward(model, *args, **options)),
        ):
            stack.enter_context(patch.object(owner, name, fake))
        return stack


PROMPT, TOKENS, LONG = 100, 128, 600
CHEAP_DRAFT, SLOW_DRAFT = 1e-4, 5e-3
"""Reported seconds of a drafted token where drafting gains, and where it does not."""


def build(count: int) -> Engine:
    model, methods = tiny_model(config=SHAPE), frozenset({"fake"})
    policy = GoodputDepth(8, padded=[PaddedBatch(methods, padded_size, lambda depth: depth)])
    sizes = SHAPE.vocab_size, SHAPE.vocab_size, True, 64 * ROWS
    proposer = DraftModelProposer(GpuRunner(model, 200_000 // 16), ROWS, *sizes)
    policy.calibrate({1 << n: PASS + ROW * (1 << n) for n in range(11)})
    limits: Any = {"kv_tokens": 200_000, "max_num_seqs": count, "max_batched_tokens": ROWS, "max_model_len": 2048}
    graphs: Any = {"runner_kind": GpuRunner, "graph_depth": 8, "graph_methods": methods}
    tokenizer = open_checkpoint("smollm2").read_tokenizer()
    engine = tiny_engine(model, proposer, policy, clock=WallClock(), tokenizer=tokenizer, **graphs, **limits)
    runner: Any = engine.runner
    runner.capture_ragged(count, ROWS)
    return engine


class Streams:
    """Streams that send the next request when a text ends. `staggered`: the first texts are shorter."""

    def __init__(self, engine: Engine, count: int, tokens: int, staggered: bool, seed: int) -> None:
        self._engine, self._tokens, self._dice, self._num_sent = engine, tokens, random.Random(seed), 0
        for i in range(count):
            self._send(1 + tokens * i // count if staggered else tokens)

    def _send(self, tokens: int) -> None:
        self._num_sent += 1
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self._engine.add(
            self._engine.validate(Request(f"r{self._num_sent}", tuple(self._dice.choices(WORDS, k=PROMPT)), sampling))
        )

    def run(self, steps: int) -> float:
        """Seconds per step."""
        began = time.process_time()
        for _ in range(steps):
            for output in self._engine.step():
                if output.finish_reason is not None:
                    self._send(self._tokens)
        return (time.process_time() - began) / steps

    def end(self) -> None:
        for i in range(self._num_sent):
            self._engine.cancel(f"r{i + 1}")


def measure(kind: str, count: int, is_on: bool, options: argparse.Namespace) -> str:
    is_served, each, pauses = kind in ("served", "joined"), list[float](), list[float]()

    def on_collection(phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:
            pauses.append(time.perf_counter() - (pauses.pop() if phase == "stop" else 0.0))

    with FakeDevice(CHEAP_DRAFT if kind in ("drafts", "prompts", "joined") else SLOW_DRAFT).installed():
        engine = build(count)
        engine.flags.apply(SpeculationFlags(is_on, None, 2))
        freeze_loaded_objects()
        gc.callbacks.append(on_collection)
        for seed in range(options.repeats):
            streams = Streams(engine, count, TOKENS if is_served else LONG, is_served, seed)
            filled = count * PROMPT // ROWS
            prompts = streams.run(filled) if filled else 0.0
            streams.run(20)
            each.append(prompts if kind == "prompts" else streams.run(options.steps))
            streams.end()
        gc.callbacks.remove(on_collection)
    step, depth = median(each), engine.speculator.traffic.report()[0].mean_depth if is_on else 0.0
    return (
        f"{kind:7} {count:3} {'goodput' if is_on else 'off':7}: {1e3 * step:6.2f} ms/step, {1e6 * step / count:5.1f} us"
        f"/sequence, depth {depth:.1f}, collections {len(pauses)}, {1e3 * max(pauses, default=0.0):.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--kinds", nargs="+", default=["plain", "drafts", "prompts", "served", "joined"])
    parser.add_argument("--steps", type=int, default=120, help="timed steps per run")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for count in options.sizes:
        for kind in options.kinds:
            for is_on in (True,) if kind in ("drafts", "joined") else (False, True):
                print(measure(kind, count, is_on, options), flush=True)


if __name__ == "__main__":
    main()

"""What poisoned samples cost: versions learned from them at the offline gate, and their trials on honest traffic.

    python benchmarks/learning_poison.py --data PROMPTS.jsonl [--traffic traffic.json] [--draft smollm2-distilled] [--period 32]

Three streams of samples, each of 24 to train on and 16 to hold out:

- `random ids`: outputs of random tokens, which no target wrote.
- `repetition`: requests that make the target repeat a word. Held-out samples are of the same stream, so that the offline gate
  measures what the attacker wants it to.
- `broken weights`: no samples; a copy of the draft with noise of one standard deviation on every matrix, as if both had failed.

Every version is then tried on honest traffic (chat and code) by the trial of a draft inside an engine, whatever the offline
gate decided: drafts alternate in periods of `--period` steps until the test ends. A step counts as one second, so that goodput
is tokens per round and load on the machine changes nothing. Drafts have five nodes. The loss is that of all rounds of the trial
against those with the draft before it. Every text is compared with plain decoding. `--gate-only` tries no version: a version
that the offline gate refuses is never offered to a server.
"""

import argparse
import itertools
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from draft_trees import noisy_copy
from learning_traffic import traffic

from learning import make_training
from paceline.cluster.pairing.draft_trial import TrialDecision
from paceline.core.clock import VirtualClock
from paceline.core.config import EngineConfig, SpeculationConfig
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.engine.build import build_engine, load_second
from paceline.engine.executors.executor import StepResult
from paceline.engine.hooks.hook import StepHook
from paceline.kernels.cpu import native
from paceline.learning.gate import decide_offline
from paceline.models.loading.hub import find_model
from paceline.models.loading.load import LoadedModel
from paceline.runtime.target_worker.draft_switchback import DraftSwitchback
from paceline.server.learning.sample_ring import LearningSample
from paceline.train.progress import StopRequest

TRAINED, HELD_OUT = 24, 16
NODES = 5
VOCABULARY = 49_152


class RoundClock(StepHook):
    """Every step takes one second."""

    def __init__(self) -> None:
        self.clock = VirtualClock()

    def committed(self, result: StepResult) -> None:
        self.clock.advance(1.0)


@dataclass(frozen=True, slots=True)
class Trial:
    decision: TrialDecision
    steps: int
    rounds: int
    """Rounds of single sequences in these steps."""
    current: float
    """Tokens per round of the draft before."""
    candidate: float
    overall: float
    """Tokens per round of all rounds of the trial."""
    different: int
    """Texts that are not those of plain decoding."""
    texts: int

    @property
    def row(self) -> str:
        loss = 1.0 - self.overall / self.current
        return (
            f"{self.decision.verdict.value}: {self.decision.reason} | {self.steps} | {self.rounds} | {self.current:.2f} | "
            f"{self.candidate:.2f} | {loss:.1%} | {self.different} of {self.texts}"
        )


def random_samples(samples: Sequence[LearningSample], vocab_size: int) -> list[LearningSample]:
    draw = random.Random(0)
    return [replace(one, output=tuple(draw.randrange(vocab_size) for _ in one.output)) for one in samples]


def try_draft(args: argparse.Namespace, draft: Path, honest: Sequence[LearningSample]) -> Trial:
    ticks = RoundClock()
    switchback = DraftSwitchback(ticks.clock, seed=0)
    config = EngineConfig(
        model=args.model,
        draft=args.draft,
        device="cpu",
        max_num_seqs=args.batch,
        max_model_len=1024,
        audit_fraction=0.0,
        speculation=SpeculationConfig(depth="fixed", max_depth=NODES, breaker_rounds=10**9),
    )
    engine = build_engine(config, hooks=(ticks, switchback))
    assert engine.tokenizer is not None
    target = LoadedModel(config.model, engine.runner.model.config, engine.runner.model, engine.tokenizer)
    switchback.begin(load_second(str(draft), config, target).model, args.most_steps, args.period)
    waiting: Iterator[tuple[int, LearningSample]] = enumerate(itertools.cycle(honest))
    running: dict[str, tuple[LearningSample, list[int]]] = {}
    tokens = rounds = different = texts = steps = 0
    while switchback.is_running or running:
        while switchback.is_running and len(running) < args.batch:
            number, sample = next(waiting)
            sampling = SamplingParams(temperature=0.0, max_tokens=args.tokens)
            engine.add(Request(f"r{number}", sample.prompt, sampling))
            running[f"r{number}"] = sample, []
        is_trial = switchback.is_running
        steps += is_trial
        for output in engine.step():
            sample, text = running[output.request_id]
            if text and is_trial:
                tokens, rounds = tokens + len(output.tokens), rounds + 1
            text.extend(output.tokens)
            if output.finish_reason is not None:
                del running[output.request_id]
                different, texts = different + (tuple(text) != sample.output), texts + 1
    current, candidate = (one.goodput for one in switchback.counts)
    return Trial(switchback.decision, steps, rounds, current, candidate, tokens / rounds, different, texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--traffic", type=Path, default=Path("traffic.json"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", default="smollm2-distilled")
    parser.add_argument("--streams", nargs="+", default=["random ids", "repetition", "broken weights"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--period", type=float, default=32.0, help="steps of a period")
    parser.add_argument("--most-steps", type=float, default=4096.0, help="steps after which a trial ends")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--gate-only", action="store_true")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="of the training; trials run on a CPU")
    parser.set_defaults(length=160, rows=4, epochs=3.0, learning_rate=1e-3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    native.set_num_threads(args.threads)
    base = find_model(args.draft).resolve()
    honest = (
        []
        if args.gate_only
        else traffic(args.data, args.traffic, {"chat": 16, "code": 40}, args.tokens, model=args.model)
    )
    random.Random(0).shuffle(honest)
    print(
        "| stream | offline gate | trial | steps | rounds | tokens per round, before | new | loss | texts different |"
    )
    print("|---" * 9 + "|", flush=True)
    for stream in args.streams:
        with tempfile.TemporaryDirectory() as name:
            out, gate = Path(name) / "draft", "no gate"
            if stream == "broken weights":
                noisy_copy(str(base), 1.0, out)
            else:
                count = {"repetition": TRAINED + HELD_OUT}
                samples = traffic(args.data, args.traffic, count, args.tokens, args.device, args.model)
                training = make_training(args, out)
                if stream == "random ids":
                    samples = random_samples(samples, VOCABULARY)
                out.mkdir()
                found = training.run(base, samples[:TRAINED], samples[TRAINED:], out, StopRequest())
                assert found is not None
                decision = decide_offline([one.rounds for one in found.before], [one.rounds for one in found.after])
                gate = ("passed: " if decision.is_better else "refused: ") + decision.reason
            row = " | ".join(["not tried", *[""] * 6]) if args.gate_only else try_draft(args, out, honest).row
            print(f"| {stream} | {gate} | {row} |", flush=True)


if __name__ == "__main__":
    main()

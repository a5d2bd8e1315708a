"""Tokens per round by category, through the engine: any method, any sampling, one request at a time.

    python benchmarks/drafts_rounds.py PROMPTS.jsonl --draft FOLDER [--draft FOLDER …] [--method layer_skip …] [--beside FOLDER]
        [--nodes 31] [--tokens 256] [--each 4] [--temperature 0] [--verification coupled] [--model smollm2]
        [--device auto]

`--draft` takes folders of trained drafts, `--method` methods without one, or `combined` with the draft of `--beside`.
The first turn of `--each` prompts of every category is answered. A row has the method and its tokens per round by
category; `drafted` are drafted tokens per round, `draft ms` the drafting time per round, `rest ms` all other time per
round, prefill included.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.bench.prompts import BenchPrompt, load_prompts
from paceline.core.config import EngineConfig, SpeculationConfig
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.engine.build import build_engine
from paceline.engine.engine import Engine
from paceline.models.tokenizer.chat_template import ChatTemplate
from paceline.speculation.drafts import DraftBatch


@dataclass(slots=True)
class Score:
    rounds: int = 0
    tokens: int = 0
    drafted: int = 0

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0


class Timed:
    """A proposer that measures its own time."""

    def __init__(self, inner: object) -> None:
        self._inner = inner
        self.seconds = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def observe(self, batch: Sequence[object]) -> None:
        started = time.perf_counter()
        self._inner.observe(batch)  # type: ignore[attr-defined]
        self.seconds += time.perf_counter() - started

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        started = time.perf_counter()
        drafts: DraftBatch = self._inner.collect(sequence_ids, deadline)  # type: ignore[attr-defined]
        self.seconds += time.perf_counter() - started
        return drafts


def first_of_each(prompts: Sequence[BenchPrompt], each: int) -> list[BenchPrompt]:
    kept: defaultdict[str, list[BenchPrompt]] = defaultdict(list)
    for prompt in prompts:
        if len(kept[prompt.category]) < each:
            kept[prompt.category].append(prompt)
    return [prompt for same in kept.values() for prompt in same]


def engine_for(options: argparse.Namespace, draft: str | None, method: str | None) -> Engine:
    speculation = SpeculationConfig(
        method=method, depth="fixed", max_depth=options.nodes, verification=options.verification, breaker_rounds=10**9
    )
    return build_engine(
        EngineConfig(
            model=options.model,
            draft=draft,
            device=options.device,
            max_num_seqs=1,
            max_model_len=options.window,
            speculation=speculation,
        )
    )


def measure(
    engine: Engine, prompts: Sequence[BenchPrompt], options: argparse.Namespace
) -> tuple[dict[str, Score], str]:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    template = ChatTemplate.of(tokenizer)
    method = engine.snapshot().flags.method
    assert method is not None
    timed = Timed(engine.speculator.proposers[method])
    engine.speculator.proposers = {**engine.speculator.proposers, method: timed}  # type: ignore[dict-item]
    scores: defaultdict[str, Score] = defaultdict(Score)
    seconds = 0.0
    for number, prompt in enumerate(prompts):
        text = template.render([{"role": "user", "content": prompt.turns[0]}])
        ids = tuple(tokenizer.encode(text, add_special=False))[-(options.window - options.tokens - 1) :]
        sampling = SamplingParams(max_tokens=options.tokens, temperature=options.temperature, seed=number)
        engine.add(Request(f"r{number}", ids, sampling, category=prompt.category))
        started = time.perf_counter()
        while engine.has_work:
            for output in engine.step():
                for score in (scores[prompt.category], scores["all"]):
                    score.rounds += 1
                    score.tokens += len(output.tokens)
                    score.drafted += output.drafted
        seconds += time.perf_counter() - started
    rounds = max(1, scores["all"].rounds)
    costs = f"{1e3 * timed.seconds / rounds:9.2f} {1e3 * (seconds - timed.seconds) / rounds:9.2f}"
    return dict(scores), f"{method:12} {costs}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--draft", action="append", default=[])
    parser.add_argument("--method", action="append", default=[])
    parser.add_argument("--beside")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--nodes", type=int, default=31)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--each", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--verification", default="coupled")
    options = parser.parse_args()
    prompts = first_of_each(load_prompts(options.prompts), options.each)
    categories = list(dict.fromkeys(prompt.category for prompt in prompts))
    print(f"{options.nodes} nodes, {options.tokens} tokens, temperature {options.temperature}, {options.verification}")
    print(
        f"{'method':12} {'draft ms':>9} {'rest ms':>9} {'drafted':>8} {'all':>6} "
        + " ".join(f"{c[:11]:>11}" for c in categories)
    )
    runs = [(draft, None) for draft in options.draft] + [(options.beside, method) for method in options.method]
    for draft, method in runs:
        scores, costs = measure(engine_for(options, draft, method), prompts, options)
        overall = scores["all"]
        row = " ".join(f"{scores[c].tokens_per_round:11.2f}" for c in categories)
        drafted = overall.drafted / max(1, overall.rounds)
        print(f"{costs} {drafted:8.1f} {overall.tokens_per_round:6.2f} {row}", flush=True)


if __name__ == "__main__":
    main()

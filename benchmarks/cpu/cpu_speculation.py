"""Speculation with an EAGLE head on this CPU by the size of the tree, next to what `goodput` chooses.

    python benchmarks/cpu/cpu_speculation.py --prompts spec_bench_dev.jsonl [--tokens 96] [--repeats 2]
        [--sizes 2 3 4 5 6 7 8] [--sampled]

One stream and one thread, pinned to a core. Times are CPU times of the process, also those that `goodput` decides by: they
leave out what other programs take of a shared machine, but not their use of its caches and memory. One prompt of each category
of spec_bench_dev.jsonl; contenders take turns. The text is the same with every tree.
"""

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.core.clock import WallClock
from paceline.core.machine import cpu_name
from paceline.core.request import SamplingParams
from paceline.engine.start.llm import LLM
from paceline.kernels.cpu import native
from paceline.kernels.cpu.eagle_head import EagleHead
from paceline.models.runner.runner import ModelRunner

RULES = ("fixed", "goodput")
Contender = tuple[str, int]
"""Depth rule and most nodes of a tree, 0 for plain decoding."""
PLAIN: Contender = ("fixed", 0)


def record(owner: type, name: str, key: str, seconds: dict[str, list[float]]) -> None:
    """Record the CPU time of every call of a method."""
    method = getattr(owner, name)

    def timed(*arguments: Any, **options: Any) -> Any:
        before = time.thread_time()  # of this engine: the other one may audit its texts meanwhile
        result = method(*arguments, **options)
        seconds[key].append(time.thread_time() - before)
        return result

    setattr(owner, name, timed)


class Results:
    """Times of all contenders: the best of every prompt, and the parts of a step."""

    def __init__(self) -> None:
        self.best: dict[tuple[Contender, str], float] = {}
        """CPU seconds by contender and category."""
        self.parts: dict[Contender, list[float]] = defaultdict(lambda: [0.0] * 4)
        """Passes, and seconds of passes, drafts and host."""

    def add(self, contender: Contender, category: str, took: float, seconds: dict[str, list[float]]) -> None:
        key = contender, category
        self.best[key] = min(self.best.get(key, took), took)
        prompt = min(1, len(seconds["draft prefill"]))
        passes, drafts = seconds["pass"][1:], seconds["head"][prompt:]  # without the prompt
        rest = took - sum(sum(values) for values in seconds.values())
        sums = (len(passes), sum(passes), sum(drafts), rest)
        self.parts[contender] = [a + b for a, b in zip(self.parts[contender], sums, strict=True)]

    def line(self, contender: Contender, categories: Iterable[str], tokens: int) -> str:
        plain = [self.best[PLAIN, category] for category in categories]
        times = [self.best[contender, category] for category in categories]
        steps, *parts = self.parts[contender]
        rule, size = contender
        name = "plain" if size == 0 else "goodput" if rule == "goodput" else f"tree of {size}"
        return " ".join(
            (
                f"{name:12} {len(times) * tokens / sum(times):8.1f} {sum(plain) / sum(times):7.2f} ",
                " ".join(f"{1e3 * part / steps:5.2f}" for part in parts),
                " ",
                " ".join(f"{a / b:.2f}" for a, b in zip(plain, times, strict=True)),
            )
        )


def load_engines(draft: str) -> dict[str, LLM]:
    """One engine of one thread for each depth rule."""
    limits: dict[str, Any] = {
        "prefix_caching": False,
        "audit_fraction": 0.0,
        "max_num_seqs": 1,
        "max_model_len": 2048,
        "kv_tokens": 4096,
    }
    engines = {
        rule: LLM("smollm2", draft=draft, speculation={"depth": rule, "max_depth": 8}, **limits) for rule in RULES
    }
    native.set_num_threads(1)
    return engines


def first_prompts(file: Path) -> dict[str, str]:
    """The first short prompt of each category."""
    prompts: dict[str, str] = {}
    for line in file.read_text().splitlines():
        question = json.loads(line)
        if len(question["turns"][0]) < 1200:
            prompts.setdefault(question["category"], question["turns"][0])
    return prompts


def measure(prompts: dict[str, str], contenders: list[Contender], options: argparse.Namespace) -> Results:
    seconds: dict[str, list[float]] = defaultdict(list)
    record(ModelRunner, "forward", "pass", seconds)
    record(EagleHead, "forward", "draft prefill", seconds)
    record(EagleHead, "grow", "head", seconds)
    record(EagleHead, "draft", "head", seconds)
    engines = load_engines(options.draft)
    choice = {"temperature": 0.2, "top_p": 0.9, "seed": 1} if options.sampled else {"temperature": 0.0}
    sampling = SamplingParams(max_tokens=options.tokens, ignore_eos=True, **choice)  # type: ignore[arg-type]
    results, texts = Results(), dict[str, object]()
    for turn in range(options.repeats + 1):  # the first is a warm-up
        for category, text in prompts.items():
            for contender in contenders:
                rule, size = contender
                seconds.clear()
                speculation = {"enabled": size > 0, "max_depth": size}
                before = time.process_time()
                answer = engines[rule].chat([{"role": "user", "content": text}], sampling, speculation=speculation)
                took = time.process_time() - before
                assert texts.setdefault(category, answer.text) == answer.text, "speculation changed the text"
                if turn:
                    results.add(contender, category, took, seconds)
    for engine in engines.values():
        engine.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prompts", type=Path, required=True, help="spec_bench_dev.jsonl, see benchmarks/gpu/README.md"
    )
    parser.add_argument("--draft", default="smollm2-eagle")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--sampled", action="store_true", help="the sampling that the model recommends, with a seed")
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    WallClock.now = staticmethod(time.process_time)  # type: ignore[method-assign,assignment]  # see above
    prompts = first_prompts(options.prompts)
    contenders = [PLAIN, *(("fixed", size) for size in options.sizes), ("goodput", 8)]
    results = measure(prompts, contenders, options)
    print(f"{cpu_name()}, one core; {len(prompts)} prompts, {options.tokens} tokens each, prefill included")
    print(f"{'':12} {'tokens/s':>8} {'/ plain':>7}  ms of a step: pass, draft, host; then / plain by category")
    for contender in contenders:
        print(results.line(contender, prompts, options.tokens))
    print("categories:", ", ".join(prompts))


if __name__ == "__main__":
    main()

"""Texts that differ on a GPU: the same requests alone, in batches, with and without drafts, in chunks, after prefix hits.

    python benchmarks/exactness/gpu_texts.py --prompts spec_bench_dev.jsonl gsm8k_train_questions.jsonl
    python benchmarks/exactness/gpu_texts.py --prompts … --groups draft,eagle --shape llama-8b
    python benchmarks/exactness/gpu_texts.py --prompts … --groups features,features_eagle     # penalties, biases and others

Every group has an engine of its own. Requests are numbered; the number is the seed, and the temperature is 0 or 0.8 in turn.
All texts of the same request, model and form of the KV cache are compared with the first of them. In the groups `features`,
four requests in five have features of sampling or three of them, and the first texts are those of the host executor.
"""

import argparse
import gc
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))
from gpu_runs import switch

from paceline.core.config import EngineConfig, SpeculationConfig
from paceline.core.request import Request, SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.start.build import build_engine
from paceline.model_files.tokenizer.chat_template import ChatTemplate
from paceline.tools.prompts.prompts import load_prompts, select

ALONE, BATCH = 16, 64


@dataclass(frozen=True)
class Form:
    """A way to run the requests."""

    name: str
    size: int
    """Requests that run at once."""
    total: int = BATCH
    drafts: bool = False
    depth: int | None = None
    is_reversed: bool = False
    is_random: bool = False
    """Requests arrive at random steps, in a random order."""
    on_host: bool = False
    """All steps run on the host executor."""


PLAIN = (
    Form("plain, alone", 1, ALONE),
    Form("plain, 64 at once", 64),
    Form("plain, 64 in reverse order", 64, is_reversed=True),
    Form("plain, arriving at random", 32, is_random=True),
)
DRAFTED = (
    Form("goodput, alone", 1, ALONE, drafts=True),
    Form("goodput, 8 at once", 8, drafts=True),
    Form("goodput, 64 at once", 64, drafts=True),
    Form("goodput, arriving at random", 32, drafts=True, is_random=True),
)
MOST = (Form("plain, 256 at once", 256, 256), Form("goodput, 256 at once", 256, 256, drafts=True))
FIXED = tuple(Form(f"depth {depth}, 16 at once", 16, drafts=True, depth=depth) for depth in (1, 4, 8))
TREES = tuple(Form(f"tree of {nodes}, 8 at once", 8, drafts=True, depth=nodes) for nodes in (31, 15, 7))
AGAIN = tuple(replace(form, name=f"{form.name}, prefix hits") for form in (PLAIN[1], DRAFTED[2]))


@dataclass(frozen=True)
class Group:
    """Forms that share an engine, and what its configuration changes."""

    forms: tuple[Form, ...]
    changes: dict[str, Any] = field(default_factory=dict)
    method: str | None = None
    draft: str | None = None
    reference: str = "bf16"
    """Texts of equal reference are compared."""
    has_features: bool = False
    """Whether requests have `FEATURES`."""


ON_HOST = Form("plain, on the host, alone", 1, 40, on_host=True)
FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.3, "frequency_penalty": 0.7},
    {"logit_bias": {token: 0.01 * (token % 300) for token in range(200, 700)}},
    {"min_tokens": 100, "stop_token_ids": tuple(range(30))},
    {},
    {"logprobs": 3},
    {"repetition_penalty": 1.1, "logit_bias": {260: 1.5}, "logprobs": 20},
    {"repetition_penalty": 0.9, "presence_penalty": -0.3, "min_tokens": 100, "stop_token_ids": tuple(range(30))},
    {"frequency_penalty": 0.9, "top_p": 0.9, "top_k": 40, "logprobs": 0},
)
"""Sampling of the requests in turn, each greedy and at a temperature."""


GROUPS = {
    "draft": Group(PLAIN + DRAFTED + FIXED + MOST),
    "combined": Group(DRAFTED[1:3], method="combined"),
    "chunk256": Group(PLAIN[1:2] + DRAFTED[2:3], {"max_batched_tokens": 256}),
    "chunk512": Group(PLAIN[1:2] + DRAFTED[2:3], {"max_batched_tokens": 512}),
    "chunk8192": Group(PLAIN[1:2] + DRAFTED[2:3], {"max_batched_tokens": 8192}),
    "prefix": Group((PLAIN[1], *AGAIN), {"prefix_caching": True}),
    "preempt": Group(PLAIN[1:2] + DRAFTED[2:3], {"kv_tokens": 12_000}),
    "eagle": Group((*PLAIN[:2], *TREES, *DRAFTED[:3]), draft="smollm2-eagle", reference="noise 0"),
    "features": Group((ON_HOST, *PLAIN, *DRAFTED, *FIXED), reference="features", has_features=True),
    "features_preempt": Group((PLAIN[1], DRAFTED[2]), {"kv_tokens": 12_000}, reference="features", has_features=True),
    "features_eagle": Group(
        (ON_HOST, PLAIN[1], *TREES, DRAFTED[2]),
        draft="smollm2-eagle",
        reference="features, noise 0",
        has_features=True,
    ),
    "fp8kv": Group(PLAIN[:3] + DRAFTED[:3], {"kv_dtype": "fp8"}, reference="fp8 KV"),
}


class Texts:
    """The first text of every request, and how many later ones differ."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, int], list[int]] = {}

    def compare(self, reference: str, texts: dict[int, list[int]]) -> tuple[int, int]:
        """(compared, different)"""
        compared = [number for number in texts if (reference, number) in self._first]
        differ = sum(self._first[reference, number] != texts[number] for number in compared)
        for number, text in texts.items():
            self._first.setdefault((reference, number), text)
        return len(compared), differ


def sampling_of(number: int, tokens: int, has_features: bool) -> SamplingParams:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.8 if number % 2 else 0.0, seed=number, ignore_eos=True)
    if not has_features:
        return sampling
    features = FEATURES[number // 2 % len(FEATURES)]
    return replace(sampling, **features | {"min_tokens": min(features.get("min_tokens", 0), tokens)})


def run(
    engine: Engine, form: Form, prompts: Sequence[list[int]], tokens: int, has_features: bool
) -> tuple[dict[int, list[int]], float]:
    """The text of each request, and the tokens drafted per round."""
    switch(engine, form.drafts, form.depth)
    order = list(range(form.total))
    if form.is_reversed:
        order.reverse()
    draw = random.Random(7)
    if form.is_random:
        draw.shuffle(order)
    texts: dict[int, list[int]] = {number: [] for number in order}
    running, rounds, drafted = 0, 0, 0
    waiting = iter(order)
    while True:
        while running < form.size and (not form.is_random or not running or draw.random() < 0.2):
            number = next(waiting, None)
            if number is None:
                break
            sampling = sampling_of(number, tokens, has_features)
            engine.add(engine.validate(Request(str(number), tuple(prompts[number % len(prompts)]), sampling)))
            running += 1
        if not engine.has_work:
            break
        for output in engine.step():
            texts[int(output.request_id)].extend(output.tokens)
            rounds, drafted = rounds + 1, drafted + output.drafted
            running -= output.finish_reason is not None
    return texts, drafted / max(1, rounds)


def build(options: argparse.Namespace, group: Group) -> Engine:
    noise = 0 if group.reference.endswith("noise 0") else options.noise
    config = EngineConfig(
        model=options.base if options.shape == "none" else f"inflate:{options.shape}?base={options.base}&noise={noise}",
        draft=group.draft or options.base,
        max_num_seqs=256,
        max_batched_tokens=2048,
        max_model_len=2048,
        kv_tokens=200_000,
        prefix_caching=False,
        speculation=SpeculationConfig(method=group.method),
    )
    engine = build_engine(replace(config, **group.changes))
    engine.warm_up()
    return engine


def rows(options: argparse.Namespace, prompts: Sequence[list[int]] | None, names: Sequence[str]) -> Iterator[str]:
    texts = Texts()
    for name in names:
        group, started = GROUPS[name], time.perf_counter()
        engine = build(options, group)
        prompts = prompts or encoded(engine, options.prompts)
        yield f"| {name} | ready after {time.perf_counter() - started:.0f} s | | | | |"
        for form in group.forms:
            started = time.perf_counter()
            with engine.executors.host_only() if form.on_host else nullcontext():
                found, depth = run(engine, form, prompts, options.tokens, group.has_features)
            seconds = time.perf_counter() - started
            compared, differ = texts.compare(group.reference, found)
            yield f"| {name} | {form.name} | {compared} | {differ} | {depth:.2f} | {seconds:.1f} |"
        del engine
        gc.collect()
        torch.cuda.empty_cache()


def encoded(engine: Engine, files: Sequence[Path]) -> list[list[int]]:
    """Token ids of the first turns, of all files in turn."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    template = ChatTemplate.of(tokenizer)
    chosen = [select(load_prompts(file), limit=256 // len(files)) for file in files]
    prompts = [prompt for together in zip(*chosen, strict=True) for prompt in together]
    return [
        list(tokenizer.encode(template.render([{"role": "user", "content": prompt.turns[0]}])))[:1500]
        for prompt in prompts
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    default = ",".join(name for name, group in GROUPS.items() if not group.has_features)
    parser.add_argument("--groups", default=default)
    parser.add_argument("--shape", default="llama-8b", help="llama-1b, llama-8b, …; none: the base model")
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--noise", type=float, default=0.06)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()
    lines = ["| engine | form | compared | different | drafted a round | s |", "|---|---|---:|---:|---:|---:|"]
    print("\n".join(lines), flush=True)
    for line in rows(options, None, options.groups.split(",")):
        print(line, flush=True)
        lines.append(line)
        if options.out:
            options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

"""Speed of the engine on one GPU, with the cost of a large model and the text of a small one (docs/large_models.md).

    python benchmarks/gpu/gpu.py plain spec sweep --shape llama-8b --base MODEL --prompts spec_bench_dev.jsonl
    python benchmarks/gpu/gpu.py plain spec --shape llama-70b --quantization fp8 --depth 7 …
    python benchmarks/gpu/gpu.py plain spec --draft TRAINED_HEAD --noise 0 --depth 31 …

`plain` and `spec` decode one stream, `batch` 64 sequences, `sweep` 1 to 256. Every figure is a median. A run is timed from
when all its sequences decode until the first one ends, without prefill. `served` runs continuous load: every stream sends
its next request when a text ends, and prefill is in the figures. benchmarks/gpu/gpu_guard.py reads the printed lines.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from gpu_runs import BANDWIDTH, Run, Served, decode, largest_gap, serve, switch

from paceline.core.clock import WallClock
from paceline.core.config import EngineConfig, SpeculationConfig
from paceline.core.machine import freeze_loaded_objects
from paceline.engine.engine import Engine
from paceline.engine.start.build import build_engine
from paceline.model_files.tokenizer.chat_template import ChatTemplate
from paceline.tools.prompts.prompts import load_prompts, select


def streams(engine: Engine, prompts: list[list[int]], options: argparse.Namespace) -> None:
    """One stream: plain, and with each depth."""
    weights = sum(
        m.nbytes for layer in engine.runner.model.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)
    )
    head = engine.runner.model.head.nbytes
    floor = (weights + head) / BANDWIDTH * 1e3
    switch(engine, False)
    decode(engine, prompts[:1], 16)
    plain = [decode(engine, [prompt], options.tokens) for prompt in prompts]
    base = median(1e3 * run.seconds / run.tokens for run in plain)
    gap = median(1 - run.device_seconds / run.seconds for run in plain)
    sample = median(1e3 * run.sample_seconds / run.steps for run in plain)
    print(
        f"plain: {base:.3f} ms/token, floor {floor:.3f} ({floor / base:.2f}), sampling {sample:.3f}, CPU gap {gap:.1%}"
    )
    if "spec" not in options.what:
        return
    for depth in options.depths:
        switch(engine, True, depth)
        decode(engine, prompts[:1], 24)
        runs = [decode(engine, [prompt], options.tokens) for prompt in prompts]
        each = median(1e3 * run.seconds / run.tokens for run in runs)
        whole = _pace(plain) / _pace(runs)
        ratio = median(a.seconds / a.tokens / (b.seconds / b.tokens) for a, b in zip(plain, runs, strict=True))
        draft = median(1e3 * run.draft_seconds / max(1, run.steps) for run in runs)
        total = Run(rounds=sum((run.rounds for run in runs), Counter()))
        same = sum(a.texts == b.texts for a, b in zip(plain, runs, strict=True))
        print(
            f"depth {depth}: {each:.3f} ms/token, {ratio:.2f}x plain ({whole:.2f}x over all tokens); "
            f"alpha {total.alpha:.3f}, mean depth {total.depth:.2f}, "
            f"tokens per round {sum(r.tokens for r in runs) / sum(r.steps for r in runs):.2f}, "
            f"drafting {draft:.3f} ms per round, "
            f"CPU gap {median(1 - r.device_seconds / r.seconds for r in runs):.1%}, same text {same}/{len(runs)}",
            flush=True,
        )
        if same < len(runs):
            _compare(engine, prompts, plain, runs)


def _pace(runs: list[Run]) -> float:
    """Seconds per token over all runs."""
    return sum(run.seconds for run in runs) / sum(run.tokens for run in runs)


def _compare(engine: Engine, prompts: list[list[int]], plain: list[Run], runs: list[Run]) -> None:
    """Print the largest distance from the arg-max of texts that differ."""
    for prompt, a, b in zip(prompts, plain, runs, strict=True):
        x, y = a.texts["r0"], b.texts["r0"]
        if x == y:
            continue
        first = next(i for i, (s, t) in enumerate(zip(x, y, strict=True)) if s != t)
        gaps = ", ".join(f"{largest_gap(engine, prompt, text):.3f}" for text in (x, y))
        print(f"  differs from token {first} of {len(x)}; largest distance from the arg-max, plain and drafted: {gaps}")


def batch64(engine: Engine, prompts: list[list[int]], options: argparse.Namespace) -> None:
    """64 sequences, plain, mean context 512."""
    filler = [token for prompt in prompts for token in prompt]
    starts = range(0, 64 * 97, 97)
    long = [(filler * 99)[start : start + 512 - options.tokens // 2] for start in starts]
    switch(engine, False)
    runs = [decode(engine, long, options.tokens) for _ in range(options.repeats)]
    each = median(1e3 * run.seconds / run.steps for run in runs)
    device = median(1e3 * run.device_seconds / run.steps for run in runs)
    print(f"batch 64, mean context 512: {each:.3f} ms/step, on the device {device:.3f}", flush=True)


def sweep(engine: Engine, prompts: list[list[int]], options: argparse.Namespace) -> None:
    for size in sizes(options):
        group = [(prompts * size)[i] for i in range(size)]
        runs = run_pairs(engine, options, lambda group=group: decode(engine, group, options.tokens))
        whole = median(plain.whole_seconds / run.whole_seconds for plain, run in runs.pairs)
        print(f"batch {size:3}: {runs}, alpha {runs.pairs[-1][1].alpha:.2f}, with prefill {whole:.2f}", flush=True)


def served(engine: Engine, prompts: list[list[int]], options: argparse.Namespace) -> None:
    for streams in sizes(options):
        arguments = prompts, streams, options.tokens, max(streams, min(16, 4 * streams)), WallClock()
        runs = run_pairs(engine, options, lambda arguments=arguments: serve(engine, *arguments))
        print(f"{streams:3} streams: {runs}", flush=True)


def sizes(options: argparse.Namespace) -> list[int]:
    """Powers of two from --smallest to --largest."""
    return [1 << n for n in range(options.largest.bit_length()) if 1 << n >= options.smallest]


@dataclass
class Comparison:
    """Pairs of runs: plain, and with `goodput`."""

    pairs: list[tuple[Run | Served, Run | Served]]

    def __str__(self) -> str:
        ratios = sorted(on.rate / off.rate for off, on in self.pairs)
        return (
            f"plain {median(off.rate for off, _ in self.pairs):8.0f} tok/s, "
            f"goodput {median(on.rate for _, on in self.pairs):8.0f}, "
            f"ratio {median(ratios):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), "
            f"depth {median(on.depth for _, on in self.pairs):.2f}"
        )


def run_pairs(engine: Engine, options: argparse.Namespace, run: Callable[[], Run | Served]) -> Comparison:
    """Run pairs; the first pair is a warm-up."""
    pairs = []
    for _ in range(options.repeats + 1):
        switch(engine, False)
        plain = run()
        switch(engine, True)
        pairs.append((plain, run()))
    return Comparison(pairs[1:])


def memory(engine: Engine) -> None:
    counted, peak = engine.counted_bytes, torch.cuda.max_memory_allocated()
    free, total = torch.cuda.mem_get_info()
    print(
        f"memory: admission counted {counted / 2**30:.2f} GiB, peak of tensors {peak / 2**30:.2f} ({peak / counted - 1:+.1%}), "
        f"device in use {(total - free) / 2**30:.2f}",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["plain", "spec", "batch", "sweep", "served"])
    parser.add_argument("--shape", default="llama-8b", help="llama-1b, llama-8b, llama-70b; none: the base model")
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--draft", help="a model or a trained draft; default: the base model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--noise", type=float, default=0.06)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--draft-quantization", default="none")
    parser.add_argument("--depth", dest="depths", type=int, action="append")
    parser.add_argument("--rule", default="fixed", help="depth rule; sweep and served use goodput")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--count", type=int, default=7, help="prompts of one stream, of all categories in turn")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smallest", type=int, default=1, help="smallest size of sweep and served")
    parser.add_argument("--largest", type=int, default=256, help="largest size, and sequences of the engine")
    options = parser.parse_args()
    options.depths = options.depths or [3, 4, 5]
    return options


def build(options: argparse.Namespace) -> Engine:
    """The engine, warmed up as that of a server."""
    started, draft = time.perf_counter(), options.draft or options.base
    inflated = f"inflate:{options.shape}?base={options.base}&noise={options.noise}"
    target = options.base if options.shape == "none" else inflated
    rule = "goodput" if {"sweep", "served"} & set(options.what) else options.rule
    engine = build_engine(
        EngineConfig(
            model=target,
            draft=draft,
            quantization=options.quantization,
            draft_quantization=options.draft_quantization,
            max_num_seqs=options.largest,
            max_batched_tokens=2048,
            max_model_len=2048,
            kv_tokens=200_000,
            prefix_caching=False,
            speculation=SpeculationConfig(depth=rule, max_depth=8 if rule == "goodput" else max(options.depths)),
        )
    )
    engine.warm_up()
    engine.hooks.finish_idle_work()
    freeze_loaded_objects()
    print(f"{target}, draft {Path(draft).name}: ready after {time.perf_counter() - started:.1f} s", flush=True)
    return engine


def encoded(engine: Engine, file: Path, limit: int) -> list[list[int]]:
    """Token ids of the first turns of at most `limit` prompts, of all categories in turn."""
    template = ChatTemplate.of(engine.tokenizer)
    return [
        list(engine.tokenizer.encode(template.render([{"role": "user", "content": prompt.turns[0]}])))
        for prompt in select(load_prompts(file), limit=limit)
    ]


def main() -> None:
    options = parse()
    engine = build(options)
    few, prompts = (encoded(engine, options.prompts, limit) for limit in (options.count, 128))
    if {"plain", "spec"} & set(options.what):
        streams(engine, few, options)
    if "batch" in options.what:
        batch64(engine, prompts, options)
    if "sweep" in options.what:
        sweep(engine, prompts, options)
    if "served" in options.what:
        served(engine, prompts, options)
    memory(engine)


if __name__ == "__main__":
    main()

"""Speed of the engine on one GPU, with the cost of a large model and the text of a small one (docs/large_models.md).

    python benchmarks/gpu.py plain spec sweep --shape llama-8b --base MODEL --prompts spec_bench_dev.jsonl
    python benchmarks/gpu.py plain spec --shape llama-70b --quantization fp8 --depth 7 …
    python benchmarks/gpu.py plain spec --draft TRAINED_HEAD --noise 0 --depth 31 …
    python benchmarks/gpu.py transformers --shape llama-8b …

`plain` and `spec` decode one stream, `batch` 64 sequences, `sweep` 1 to 256. Every figure is a median. A run is timed from
when all its sequences decode until the first one ends, without prefill. `served` runs continuous load: every stream sends
its next request when a text ends, and prefill is in the figures. benchmarks/gpu_guard.py reads the printed lines.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from gpu_runs import Served, largest_gap, serve

from paceline.bench.prompts import load_prompts, select
from paceline.core.clock import WallClock
from paceline.core.config import EngineConfig, SpeculationConfig
from paceline.core.machine import freeze_loaded_objects
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.core.speculation import SpeculationFlags
from paceline.engine.build import build_engine
from paceline.engine.engine import Engine
from paceline.models.tokenizer.chat_template import ChatTemplate

BANDWIDTH = 4.3e12  # bytes per second of a large copy on an H200


@dataclass
class Run:
    """Decoding of one batch, from when all sequences decode until the first ends."""

    seconds: float = 0.0
    whole_seconds: float = 0.0
    """Time of the whole run, prefill included."""
    tokens: int = 0
    steps: int = 0
    rounds: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Number of rounds by (drafted, accepted)."""
    device_seconds: float = 0.0
    draft_seconds: float = 0.0
    sample_seconds: float = 0.0
    texts: dict[str, list[int]] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def alpha(self) -> float:
        """Acceptance of a position, given that all before it were accepted."""
        tried = sum(count * (accepted + (accepted < drafted)) for (drafted, accepted), count in self.rounds.items())
        return sum(count * accepted for (_, accepted), count in self.rounds.items()) / tried if tried else 0.0

    @property
    def depth(self) -> float:
        return sum(count * drafted for (drafted, _), count in self.rounds.items()) / max(1, self.rounds.total())


def decode(engine: Engine, prompts: list[list[int]], max_tokens: int, temperature: float = 0.0) -> Run:
    run, sent_at, started, waiting = Run(), time.perf_counter(), 0.0, set()
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=i, ignore_eos=True)
        engine.add(Request(f"r{i}", tuple(prompt), sampling))
        waiting.add(f"r{i}")
    run.texts = {name: [] for name in waiting}
    is_timed, at_first = True, engine.graph.num_steps
    while engine.has_work:
        rounds_before = engine.graph.num_steps
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            run.texts[output.request_id].extend(output.tokens)
            waiting.discard(output.request_id)
        if not started:
            if not waiting and engine.graph.num_steps > at_first + 1:
                started = now
            continue
        if not is_timed:
            continue
        run.seconds, run.steps = now - started, run.steps + bool(outputs)
        run.tokens += sum(len(output.tokens) for output in outputs)
        run.rounds.update((output.drafted, output.accepted) for output in outputs)
        if engine.graph.num_steps > rounds_before:
            step = engine.graph.last_result
            run.device_seconds += step.draft_seconds + step.verify_seconds
            run.draft_seconds += step.draft_seconds
            run.sample_seconds += step.verify_seconds - step.forward_seconds
        is_timed = all(output.finish_reason is None for output in outputs)
    run.whole_seconds = time.perf_counter() - sent_at
    return run


def switch(engine: Engine, enabled: bool, depth: int | None = None) -> None:
    engine.flags.apply(SpeculationFlags(enabled, None, depth))


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


def transformers(engine: Engine, prompts: list[list[int]], options: argparse.Namespace) -> None:
    from gpu_transformers import compare

    ours = {}
    for name, enabled in (("plain", False), ("speculative", True)):
        switch(engine, enabled, max(options.depths) if enabled else None)
        decode(engine, prompts[:1], 24)
        runs = [decode(engine, [prompt], options.tokens) for prompt in prompts]
        ours[name] = median(1e3 * run.seconds / run.tokens for run in runs)
    compare(engine, prompts, options.tokens, ours)


def memory(engine: Engine) -> None:
    fit, peak = engine.memory, torch.cuda.max_memory_allocated()
    counted = fit.weight_bytes + fit.activation_bytes + fit.kv_bytes
    free, total = torch.cuda.mem_get_info()
    print(
        f"memory: admission counted {counted / 2**30:.2f} GiB, peak of tensors {peak / 2**30:.2f} ({peak / counted - 1:+.1%}), "
        f"device in use {(total - free) / 2**30:.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["plain", "spec", "batch", "sweep", "served", "transformers"])
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
    target = (
        options.base
        if options.shape == "none"
        else f"inflate:{options.shape}?base={options.base}&noise={options.noise}"
    )
    rule = "goodput" if {"sweep", "served"} & set(options.what) else options.rule
    started = time.perf_counter()
    engine = build_engine(
        EngineConfig(
            model=target,
            draft=options.draft or options.base,
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
    freeze_loaded_objects()  # as a server does
    print(
        f"{target}, draft {Path(options.draft or options.base).name}: ready after {time.perf_counter() - started:.1f} s",
        flush=True,
    )
    template = ChatTemplate.of(engine.tokenizer)
    few, prompts = (
        [
            list(engine.tokenizer.encode(template.render([{"role": "user", "content": prompt.turns[0]}])))
            for prompt in select(load_prompts(options.prompts), limit=limit)
        ]
        for limit in (options.count, 128)
    )
    if {"plain", "spec"} & set(options.what):
        streams(engine, few, options)
    if "batch" in options.what:
        batch64(engine, prompts, options)
    if "sweep" in options.what:
        sweep(engine, prompts, options)
    if "served" in options.what:
        served(engine, prompts, options)
    if "transformers" in options.what:
        transformers(engine, few, options)
    memory(engine)


if __name__ == "__main__":
    main()

"""vLLM plain and with our plugin, and our engine, in one run: every engine is a process, and contenders take turns.

    python benchmarks/vllm_plugin.py --model FOLDER --draft DRAFT --prompts spec_bench_dev.jsonl
    python benchmarks/vllm_plugin.py --contenders plain_sync,suffix,combined --sizes 1,8 …
    python benchmarks/vllm_plugin.py --sizes 1,8,32,64,128,256 --large plain,paceline …

FOLDER is a Hugging Face folder, for example of `paceline bench inflate`. DRAFT is a small model as a folder, for the pool and
our engine. PROMPTS are prompts of `paceline bench`, or a JSON list of lists of token ids. A figure is the throughput of a
whole run: prompts and stragglers are included. Contenders:

    plain        vLLM as it comes, with async scheduling
    plain_sync   vLLM without async scheduling, in the model runner that custom_class uses
    ngram, suffix, combined   LocalProposer
    full         LocalProposer `combined`, with CUDA graphs for steps of any shape (cudagraph_mode FULL)
    pool         PoolProposer, with a draft worker on the CPU cores
    pool_gpu     PoolProposer, with a draft worker on the same GPU
    draft_model  vLLM's own draft model
    paceline     our engine, with DRAFT
    paceline_plain  the same process, with speculation off in each request

A contender that does not start or that fails is left out with the end of its log; the others go on. Contenders that --large
names also run sizes above 64, with a larger KV cache. Needs vLLM on PYTHONPATH beside src/; the plugin needs no installation.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from vllm_child import Child, Lost
from vllm_contender import ENGINES, POOLS, Tokens, kv_gib, serve, sizes_of, worker_address

CONTENDERS = (*ENGINES, "paceline_plain")
NEED_DRAFT = {"pool", "pool_gpu", "draft_model", "paceline", "paceline_plain"}
OVERHEAD_GIB = 4.0
"""About what a process needs on a GPU besides weights and KV cache."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--contenders", default="plain,plain_sync,combined,pool,paceline_plain,paceline")
    parser.add_argument("--sizes", default="1,8,32,64")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4, help="num_speculative_tokens of vLLM")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each contender and size; the median counts")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--coupled", action="store_true", help="coupled sampling in the plugin's contenders")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--kv-gib", type=float, default=3.5, help="KV cache of each process")
    parser.add_argument("--large", default="plain,paceline", help="contenders that also run sizes above 64")
    parser.add_argument("--large-kv-gib", type=float, default=13.0, help="KV cache of these, if there are such sizes")
    parser.add_argument("--sequential", action="store_true", help="start the processes one after the other")
    parser.add_argument("--ready-seconds", type=float, default=420, help="longest start of a process")
    parser.add_argument("--run-seconds", type=float, default=120, help="longest run")
    parser.add_argument("--worker-threads", type=int, default=8, help="threads of a draft worker on the CPU cores")
    parser.add_argument("--logs", type=Path, default=Path("build/vllm_plugin/logs"))
    parser.add_argument("--cache", type=Path, default=Path("build/vllm_plugin/cache"), help="vLLM's compiled code")
    parser.add_argument("--out", type=Path, help="JSON file of all figures")
    parser.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    return parser.parse_args()


def engine_of(contender: str) -> str:
    return contender.removesuffix("_plain")


def start(names: Sequence[str], options: argparse.Namespace, children: dict[str, Child]) -> dict[str, Child]:
    """Add all processes to `children`; return those that became ready, without the draft workers."""
    ready: dict[str, Child] = {}
    engines = list(dict.fromkeys(map(engine_of, names)))
    for name in engines:
        if name in POOLS:
            worker = f"{name}_worker"
            children[worker] = Child(worker, worker_command(name, options), options.logs)
    for name in engines:
        command = [sys.executable, __file__, *sys.argv[1:], "--child", name]
        children[name] = Child(name, command, options.logs)
        if options.sequential and is_ready(name, children, options):
            ready[name] = children[name]
    if not options.sequential:
        ready = {name: children[name] for name in engines if is_ready(name, children, options)}
    return ready


def is_ready(name: str, children: dict[str, Child], options: argparse.Namespace) -> bool:
    """Wait for a process, and for its draft worker if it has one. One that does not start is stopped."""
    for child in [children[one] for one in (f"{name}_worker", name) if one in children]:
        try:
            print(f"{child.name}: ready after {child.wait(options.ready_seconds):.0f} s", flush=True)
        except Lost as lost:
            print(f"{name} is left out: {lost}\n{child.log_end()}", flush=True)
            children[name].stop()
            return False
    return True


def worker_command(name: str, options: argparse.Namespace) -> list[str]:
    largest = max(sizes_of(name, options))
    return [
        sys.executable, "-m", "paceline.vllm.draft_worker", "--draft", options.draft, "--model", options.model,
        "--address", worker_address(name, options), "--threads", str(options.worker_threads), "--device", POOLS[name],
        "--max-num-seqs", str(largest), "--max-model-len", str(options.max_model_len),
        "--kv-tokens", str((largest + 1) * options.max_model_len),
    ]  # fmt: skip


def read_prompts(options: argparse.Namespace, count: int) -> Tokens:
    """Token ids of `count` prompts, none longer than the context window allows."""
    if options.prompts.suffix == ".json":
        found = [list(ids) for ids in json.loads(options.prompts.read_text("utf-8"))]
    else:
        from paceline.bench.prompts import load_prompts, select
        from paceline.models.tokenizer.chat_template import ChatTemplate
        from paceline.models.tokenizer.load import load_tokenizer

        tokenizer = load_tokenizer(options.model)
        template = ChatTemplate.of(tokenizer)
        found = []
        for prompt in select(load_prompts(options.prompts)):
            messages = [{"role": "user", "content": prompt.turns[0][:4000]}]
            found.append(list(tokenizer.encode(template.render(messages), add_special=False)))
    longest = options.max_model_len - options.tokens - options.depth - 8
    found = [ids for ids in found if len(ids) <= longest]
    return [found[i % len(found)] for i in range(count)]


class Result(NamedTuple):
    """Runs of one contender at one size."""

    size: int
    contender: str
    rates: list[float]
    """Tokens per second."""
    tokens: Tokens
    counted: dict[str, int]
    """Steps, drafted and accepted tokens of the last run."""


HEADER = (
    "| sequences | contender | tok/s, median | min to max | / plain | / plain_sync | texts that differ | counted |\n"
    "|---|---|---|---|---|---|---|---|"
)


def measure(names: list[str], ready: dict[str, Child], prompts: Tokens, options: argparse.Namespace) -> list[Result]:
    """All results; a contender that fails is left out from then on."""
    results: list[Result] = []
    print(f"\n{HEADER}", flush=True)
    for size in map(int, options.sizes.split(",")):
        rows = {
            name: Result(size, name, [], [], {})
            for name in names
            if engine_of(name) in ready and size in sizes_of(name, options)
        }
        for repeat in range(options.repeats + 1):  # the first is for kernels, graphs, and what the depth rule learns
            for name in list(rows):
                child = ready.get(engine_of(name))
                some = prompts[:size] if repeat else prompts[4 : 4 + size]
                request = {"prompts": some, "tokens": options.tokens, "speculate": name != "paceline_plain"}
                try:
                    if child is None:
                        raise Lost(f"its process {engine_of(name)} is lost")
                    answer = child.ask(request, options.run_seconds)
                except Lost as lost:
                    print(f"\n{name} is left out: {lost}\n{child.log_end() if child else ''}\n\n{HEADER}", flush=True)
                    if child is not None:
                        ready.pop(engine_of(name)).stop()
                    del rows[name]
                    continue
                if repeat:
                    rows[name].rates.append(size * options.tokens / answer["seconds"])
                    rows[name] = rows[name]._replace(tokens=answer["tokens"], counted=answer["counted"])
        for name in rows:
            print(describe(rows, name), flush=True)
        results += rows.values()
    return results


def describe(rows: dict[str, Result], name: str) -> str:
    """A row of the table. Texts are compared with those of plain_sync, else of plain, else of the first contender."""
    row = rows[name]
    middle = median(row.rates)
    ratios = [f"{middle / median(rows[base].rates):.2f}" if base in rows else "" for base in ("plain", "plain_sync")]
    base = next((base for base in ("plain_sync", "plain") if base in rows), next(iter(rows)))
    differing = sum(a != b for a, b in zip(row.tokens, rows[base].tokens, strict=True))
    counted = ", ".join(f"{value} {key}" for key, value in row.counted.items())
    spread = f"{min(row.rates):.0f} to {max(row.rates):.0f}"
    return f"| {row.size} | {name} | {middle:.0f} | {spread} | {' | '.join(ratios)} | {differing} | {counted} |"


def print_memory(names: Sequence[str], options: argparse.Namespace) -> None:
    """About what all processes need on the GPU."""
    weights = sum(file.stat().st_size for file in Path(options.model).glob("*.safetensors")) / 2**30
    engines = dict.fromkeys(map(engine_of, names))
    needed = sum(weights + OVERHEAD_GIB + kv_gib(name, options) for name in engines)
    print(f"{len(engines)} processes need about {needed:.0f} GiB: {weights:.1f} of weights each", flush=True)


def main() -> None:
    options = parse()
    if options.child:
        serve(options.child, options)
        return
    names = options.contenders.split(",")
    if unknown := set(names) - set(CONTENDERS):
        sys.exit(f"unknown contenders: {', '.join(sorted(unknown))}; choose from {', '.join(CONTENDERS)}")
    if not options.draft and set(names) & NEED_DRAFT:
        sys.exit(f"{', '.join(sorted(set(names) & NEED_DRAFT))}: give --draft")
    if small := [name for name in names if not sizes_of(name, options)]:
        sys.exit(f"{', '.join(small)}: give a size of at most 64, or name them in --large")
    options.logs.mkdir(parents=True, exist_ok=True)
    prompts = read_prompts(options, max(map(int, options.sizes.split(","))) + 4)
    if options.device != "cpu":
        print_memory(names, options)
    children: dict[str, Child] = {}
    try:
        ready = start(names, options, children)
        results = measure(names, ready, prompts, options)
        if options.out:
            options.out.write_text(json.dumps([row._asdict() for row in results]), "utf-8")
    finally:
        for child in children.values():
            child.stop()


if __name__ == "__main__":
    main()

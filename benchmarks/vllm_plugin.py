"""vLLM plain and with our plugin, and our engine, in one run: every contender is a process, and they take turns.

    python benchmarks/vllm_plugin.py --model FOLDER --draft DRAFT --prompts spec_bench_dev.jsonl
    python benchmarks/vllm_plugin.py --contenders plain_sync,suffix,combined --sizes 1,8 …

FOLDER is a Hugging Face folder, for example of `paceline bench inflate`. DRAFT is a small model as a folder, for the pool and
our engine. PROMPTS are prompts of `paceline bench`, or a JSON list of lists of token ids. A figure is the throughput of a
whole run: prompts and stragglers are included. Contenders:

    plain        vLLM as it comes, with async scheduling
    plain_sync   vLLM without async scheduling, in the model runner that custom_class uses
    ngram, suffix, combined   LocalProposer
    full         LocalProposer `combined`, with CUDA graphs for steps of any shape (cudagraph_mode FULL)
    pool         PoolProposer, with a draft worker on the CPU cores
    draft_model  vLLM's own draft model
    paceline     our engine, with DRAFT

Needs vLLM on PYTHONPATH beside src/; the plugin needs no installation.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TextIO

CONTENDERS = ("plain", "plain_sync", "ngram", "suffix", "combined", "full", "pool", "draft_model", "paceline")
LOCAL = {"ngram": "ngram", "suffix": "suffix", "combined": "combined", "full": "combined"}
WORKER = "tcp://127.0.0.1:15755"

Run = Callable[[Sequence[Sequence[int]], int], tuple[float, list[list[int]]]]
"""(prompts, new tokens of each) -> seconds, tokens."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--contenders", default="plain,plain_sync,combined,full,pool,paceline")
    parser.add_argument("--sizes", default="1,8,32,64")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4, help="num_speculative_tokens of vLLM")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each contender and size; the median counts")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--coupled", action="store_true", help="coupled sampling in the plugin's contenders")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--memory", type=float, default=0.15, help="share of the GPU's memory of each contender")
    parser.add_argument("--kv-gib", type=float, default=3.5, help="KV cache of each vLLM")
    parser.add_argument("--sequential", action="store_true", help="start the contenders one after the other")
    parser.add_argument("--worker-threads", type=int, default=8, help="threads of the pool's draft worker")
    parser.add_argument("--worker-device", default="cpu")
    parser.add_argument("--logs", type=Path, default=Path("build/vllm_plugin_logs"))
    parser.add_argument("--child", choices=CONTENDERS, help=argparse.SUPPRESS)
    return parser.parse_args()


# ---------------------------------------------------------------- one contender, in its own process


def child(name: str, options: argparse.Namespace) -> None:
    """Answer runs on standard input until it ends. Logs go to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    largest = max(int(size) for size in options.sizes.split(","))
    run, report = (paceline_engine if name == "paceline" else vllm_engine)(name, options, largest)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        seconds, tokens = run(request["prompts"], request["tokens"])
        print(json.dumps({"seconds": seconds, "tokens": tokens, "report": report()}), file=answers, flush=True)


def vllm_engine(name: str, options: argparse.Namespace, largest: int) -> tuple[Run, Callable[[], dict[str, Any]]]:
    os.environ.update(
        VLLM_NO_USAGE_STATS="1",
        VLLM_USE_FLASHINFER_SAMPLER="0",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="INFO",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CACHE_ROOT=str((options.logs / f"cache-{name}").resolve()),  # processes that start together share none
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        HF_HUB_OFFLINE="1",
    )
    if name not in ("plain", "draft_model"):
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        os.environ["PACELINE_COUPLED_SAMPLING"] = "1" if options.coupled else "0"
    from paceline.vllm import register
    from vllm import LLM, SamplingParams

    register()
    arguments: dict[str, Any] = {}
    plugin = {"method": "custom_class", "num_speculative_tokens": options.depth}
    if name == "plain_sync":
        arguments["async_scheduling"] = False
    elif name in LOCAL:
        arguments["speculative_config"] = {**plugin, "model": "paceline.vllm.LocalProposer"}
        arguments["additional_config"] = {"paceline": {"method": LOCAL[name]}}
    elif name == "pool":
        arguments["speculative_config"] = {**plugin, "model": "paceline.vllm.PoolProposer"}
        arguments["additional_config"] = {"paceline": {"workers": [WORKER]}}
    elif name == "draft_model":
        arguments["speculative_config"] = {
            "method": "draft_model",
            "model": options.draft,
            "num_speculative_tokens": options.depth,
        }
    if name == "full":
        arguments["compilation_config"] = {"cudagraph_mode": "FULL"}
    if options.device == "cpu":
        arguments["enforce_eager"] = True
    else:
        arguments["gpu_memory_utilization"] = options.memory
        arguments["kv_cache_memory_bytes"] = int(options.kv_gib * 2**30)  # not measured: others start meanwhile
    llm = LLM(
        model=options.model,
        dtype=options.dtype,
        max_num_seqs=largest,
        max_model_len=options.max_model_len,
        enable_prefix_caching=False,
        **arguments,
    )

    def run(prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, list[list[int]]]:
        params = [
            SamplingParams(max_tokens=tokens, temperature=options.temperature, seed=seed, ignore_eos=True)
            for seed in range(len(prompts))
        ]
        started = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)
        return time.perf_counter() - started, [list(output.outputs[0].token_ids) for output in outputs]

    def report() -> dict[str, Any]:
        try:
            runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
            loop = runner.drafter.loop
        except AttributeError:  # a plain vLLM, or one with another structure
            return {}
        return {"steps": loop.num_steps, "drafted": loop.num_drafted, "accepted": loop.num_accepted}

    return run, report


def paceline_engine(name: str, options: argparse.Namespace, largest: int) -> tuple[Run, Callable[[], dict[str, Any]]]:
    from paceline import LLM, SamplingParams

    llm = LLM(
        options.model,
        draft=options.draft,
        device=options.device,
        dtype=options.dtype,
        max_num_seqs=largest,
        max_model_len=options.max_model_len,
        memory_fraction=options.memory,
        prefix_caching=False,
    )
    llm.warm_up()

    def run(prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, list[list[int]]]:
        params = [
            SamplingParams(max_tokens=tokens, temperature=options.temperature, seed=seed, ignore_eos=True)
            for seed in range(len(prompts))
        ]
        started = time.perf_counter()
        outputs = llm.generate([list(ids) for ids in prompts], params)
        return time.perf_counter() - started, [list(output.completions[0].token_ids) for output in outputs]

    return run, dict


# ---------------------------------------------------------------- the run


class Contender:
    """A process that answers runs."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self._log: TextIO = (options.logs / f"{name}.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--child", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def wait(self) -> None:
        self._answer()

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self._process.wait()}: see {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def read_prompts(options: argparse.Namespace, count: int) -> list[list[int]]:
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


def start_worker(options: argparse.Namespace) -> subprocess.Popen[bytes]:
    largest = max(int(size) for size in options.sizes.split(","))
    return subprocess.Popen(
        [
            sys.executable, "-m", "paceline.vllm.draft_worker", "--draft", options.draft, "--model", options.model,
            "--address", WORKER, "--threads", str(options.worker_threads), "--device", options.worker_device,
            "--max-num-seqs", str(largest), "--max-model-len", str(options.max_model_len),
            "--kv-tokens", str((largest + 1) * options.max_model_len),
        ],
        stdin=subprocess.DEVNULL,
        stdout=(options.logs / "worker.log").open("w"),
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def main() -> None:
    options = parse()
    if options.child:
        child(options.child, options)
        return
    names = options.contenders.split(",")
    if unknown := set(names) - set(CONTENDERS):
        sys.exit(f"unknown contenders: {', '.join(sorted(unknown))}; choose from {', '.join(CONTENDERS)}")
    if not options.draft and set(names) & {"pool", "draft_model", "paceline"}:
        sys.exit("pool, draft_model and paceline need --draft")
    if options.device != "cpu" and len(names) * options.memory > 0.95:
        sys.exit(f"{len(names)} contenders do not fit with --memory {options.memory}: run fewer at a time")
    options.logs.mkdir(parents=True, exist_ok=True)
    sizes = [int(size) for size in options.sizes.split(",")]
    prompts = read_prompts(options, max(sizes) + 4)
    worker = start_worker(options) if "pool" in names else None
    contenders: list[Contender] = []
    try:
        started = time.perf_counter()
        for name in names:
            contenders.append(Contender(name, options))
            if options.sequential:
                contenders[-1].wait()
        for contender in [] if options.sequential else contenders:
            contender.wait()
        print(f"{', '.join(names)}: ready after {time.perf_counter() - started:.0f} s", flush=True)
        measure(contenders, sizes, prompts, options)
    finally:
        for contender in contenders:
            contender.stop()
        if worker is not None:
            worker.terminate()
            worker.wait()


def measure(
    contenders: Sequence[Contender], sizes: Sequence[int], prompts: list[list[int]], options: argparse.Namespace
) -> None:
    base = next((one.name for one in contenders if one.name == "plain_sync"), contenders[0].name)
    lines = [
        "| sequences | " + " | ".join(f"{one.name} tok/s | / {base}" for one in contenders) + " |",
        "|---" * (1 + 2 * len(contenders)) + "|",
    ]
    for size in sizes:
        some = prompts[:size]
        for one in contenders:  # once for kernels and graphs of this size, and for what the depth rule has to learn
            one.run(prompts[4 : 4 + size], options.tokens)
        rates: dict[str, list[float]] = {one.name: [] for one in contenders}
        texts: dict[str, list[list[int]]] = {}
        reports: dict[str, Any] = {}
        for _ in range(options.repeats):
            for one in contenders:
                answer = one.run(some, options.tokens)
                rates[one.name].append(size * options.tokens / answer["seconds"])
                texts[one.name], reports[one.name] = answer["tokens"], answer["report"]
        middle = {name: median(values) for name, values in rates.items()}
        cells = " | ".join(f"{middle[one.name]:.0f} | {middle[one.name] / middle[base]:.2f}" for one in contenders)
        lines.append(f"| {size} | {cells} |")
        print(lines[-1], flush=True)
        for one in contenders:
            differing = sum(a != b for a, b in zip(texts[one.name], texts[base], strict=True))
            spread = f"{min(rates[one.name]):.0f} to {max(rates[one.name]):.0f}"
            print(
                f"    {one.name}: {spread} tok/s, {differing} texts differ from {base}, {reports[one.name]}", flush=True
            )
    print("\n" + "\n".join(lines), flush=True)


if __name__ == "__main__":
    main()

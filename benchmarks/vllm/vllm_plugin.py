"""vLLM plain and with our plugin, and our engine, in one run: every engine is a process, and contenders take turns.

    python benchmarks/vllm/vllm_plugin.py --model FOLDER --draft DRAFT --prompts PROMPTS --warm-up OTHER_PROMPTS
    python benchmarks/vllm/vllm_plugin.py --contenders plain_sync,suffix,combined --sizes 1,8 …
    python benchmarks/vllm/vllm_plugin.py --sizes 1,8,32,64,128,256 --large plain,paceline …
    python benchmarks/vllm/vllm_plugin.py --contenders plain,paceline_plain,paceline --turn-tokens 300 …

FOLDER is a Hugging Face folder, for example of `paceline bench inflate`. DRAFT is a small model as a folder, for the pool and
our engine. PROMPTS are prompts of `paceline bench`, or a JSON list of lists of token ids. A figure is the throughput of a
whole run: prompts and stragglers are included. Contenders:

    plain        vLLM as it comes, with async scheduling
    plain_sync   vLLM without async scheduling, in the model runner that custom_class uses
    ngram, suffix, combined   LocalProposer
    pool         PoolProposer, with a draft worker on the CPU cores
    pool_gpu     PoolProposer, with a draft worker on the same GPU
    draft_model  vLLM's own draft model
    paceline     our engine, with DRAFT
    paceline_plain  the same process, with speculation off in each request
    paceline_head   our engine, with --head on --head-model: a head fits the model that it was trained for, which is inflated
                    without noise; its texts are therefore others

There are two groups of runs. New prompts are decoded once by each contender. Repeated prompts are decoded again by the
contenders that look drafts up in earlier texts, which are then right. Decoding is greedy.

With `--turn-tokens` prefix caching is on in every engine, and next turns take the place of repeated prompts. After a run of
new prompts, each contender decodes the same prompts with that many more tokens. Prompts must differ from their first tokens
on: "cached", in the column "counted", is how many prompt tokens an engine found in its cache. The KV cache must hold one run.
With `--tokens 1` and one sequence, a run lasts until the first token.

A contender that does not start or that fails is left out with the end of its log; the others go on. Contenders that --large
names also run sizes above 64, with a larger KV cache. Needs vLLM on PYTHONPATH next to src/; the plugin needs no installation.
"""

import argparse
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm_contender import ENGINES, POOLS, SMALL, kv_gib, serve, sizes_of, worker_address
from vllm_rounds import WARM_UP, WITHOUT_LOOKUP, NotEnoughPrompts, Outcome, Run, plan, read_prompts, tables

LOG_LINES = 14
"""Lines of the end of a log."""


class Lost(Exception):
    """A process that did not answer in time, or ended."""


class Child:
    """A process whose standard output is read line by line, with a time limit."""

    def __init__(self, name: str, command: Sequence[str], logs: Path) -> None:
        self.name = name
        self._log_file = logs / f"{name}.log"
        self._started = time.perf_counter()
        with self._log_file.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._lines: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def wait(self, seconds: float) -> float:
        """Seconds from its start to its first line."""
        try:
            at, _ = self._line(max(1.0, self._started + seconds - time.perf_counter()))
        except queue.Empty:
            raise Lost(f"{self.name} was not ready {seconds:.0f} s after its start") from None
        return at - self._started

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._line(seconds)[1])
        except queue.Empty:
            raise Lost(f"{self.name} did not answer within {seconds:.0f} s") from None
        except OSError as error:
            raise Lost(f"{self.name}: {error}") from None
        return answer

    def terminate(self) -> None:
        """Ask it to end; `stop` waits for that."""
        self._process.terminate()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def log_end(self) -> str:
        text = self._log_file.read_text("utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return "\n".join(f"    {line[:200]}" for line in lines[-LOG_LINES:])

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put((time.perf_counter(), line))
        self._lines.put((time.perf_counter(), ""))

    def _line(self, seconds: float) -> tuple[float, str]:
        at, line = self._lines.get(timeout=seconds)
        if not line:
            raise Lost(f"{self.name} ended with status {self._process.wait()}")
        return at, line


CONTENDERS = (*ENGINES, "paceline_plain")
NEED_DRAFT = {"pool", "pool_gpu", "draft_model", "paceline", "paceline_plain"}
OVERHEAD_GIB = 2.5
"""About what a process needs on a GPU besides weights and KV cache."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--head", default="smollm2-eagle", help="the draft of paceline_head")
    parser.add_argument("--head-model", help="the model of paceline_head, of the same shape")
    parser.add_argument("--prompts", required=True, type=Path, help="prompts that are measured, each in one run")
    parser.add_argument("--large-prompts", type=Path, help="prompts of sizes above 64; those of --prompts")
    parser.add_argument("--warm-up", type=Path, help="prompts of the warm-up; the last of --prompts")
    parser.add_argument("--max-prompt", type=int, default=1 << 30, help="tokens of the longest prompt that is used")
    parser.add_argument("--contenders", default="plain,plain_sync,combined,pool,paceline_plain,paceline")
    parser.add_argument("--sizes", default="1,8,32,64")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--warm-up-tokens", type=int, default=64)
    parser.add_argument(
        "--turn-tokens",
        type=int,
        default=0,
        help="prompt tokens that a next turn adds; 0 turns next turns and prefix caching off",
    )
    parser.add_argument("--depth", type=int, default=4, help="num_speculative_tokens of vLLM")
    parser.add_argument(
        "--repeats", type=int, default=2, help="runs of each contender, size and group; the median counts"
    )
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after the start from which no run begins")
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
    parser.add_argument("--log-decisions", action="store_true", help="log what our depth policy expects")
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
    for child in [children[process] for process in (f"{name}_worker", name) if process in children]:
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


class Measurement:
    """Asks the processes in turn. A contender that fails is left out from then on."""

    def __init__(
        self, names: Sequence[str], ready: dict[str, Child], options: argparse.Namespace, started: float
    ) -> None:
        """`started`: when the limit began to count."""
        self._names, self._ready, self._options, self._started = names, ready, options, started
        self.outcomes: list[Outcome] = []

    def time_runs(self, runs: Iterable[Run]) -> None:
        """Add to `outcomes`, until all runs are done or the limit is reached."""
        for run in runs:
            if time.perf_counter() - self._started > self._options.limit:
                print(f"{run} and later runs are left out: the limit is reached", flush=True)
                return
            turns = [(turn, list[str]()) for turn in run.turns]
            for name in self._names:
                if engine_of(name) in self._ready and run.includes(name) and self._fits(name, run):
                    for turn, rates in turns:
                        outcome = self._time(name, turn)
                        if outcome is not None and turn.group != WARM_UP:
                            self.outcomes.append(outcome)
                            rates.append(f"{name} {outcome.rate:.0f}")
            for turn, rates in turns:
                if rates:
                    print(f"{turn}, tok/s: {', '.join(rates)}", flush=True)

    def _fits(self, name: str, run: Run) -> bool:
        return len(run.prompts) in sizes_of(name, self._options)

    def _time(self, name: str, run: Run) -> Outcome | None:
        tokens = self._options.warm_up_tokens if run.group == WARM_UP else self._options.tokens
        request = {"prompts": run.prompts, "tokens": tokens, "speculate": name != "paceline_plain"}
        # Two contenders share the process of our engine: the second would find the prompts of the first in the prefix cache.
        answer = self._ask(name, {**request, "cache_salt": name})
        return None if answer is None else Outcome.of(run, name, answer)

    def _ask(self, name: str, request: dict[str, Any]) -> dict[str, Any] | None:
        child = self._ready.get(engine_of(name))
        if child is None:
            return None
        try:
            return child.ask(request, self._options.run_seconds)
        except Lost as lost:
            print(f"\n{name} is left out: {lost}\n{child.log_end()}\n", flush=True)
            self._ready.pop(engine_of(name)).stop()
            return None


def print_memory(names: Sequence[str], options: argparse.Namespace) -> None:
    """About what all processes need on the GPU."""
    weights = sum(file.stat().st_size for file in Path(options.model).glob("*.safetensors")) / 2**30
    engines = dict.fromkeys(map(engine_of, names))
    needed = sum(weights + OVERHEAD_GIB + kv_gib(name, options) for name in engines)
    print(f"{len(engines)} processes need about {needed:.0f} GiB: {weights:.1f} of weights each", flush=True)


def plan_runs(names: Sequence[str], options: argparse.Namespace) -> list[Run]:
    sizes = [int(size) for size in options.sizes.split(",")]
    longest = options.max_model_len - options.turn_tokens - options.tokens - options.depth - 8
    longest = min(options.max_prompt, longest)
    prompts = read_prompts(options.prompts, options.model, longest)
    warm_up = read_prompts(options.warm_up, options.model, longest) if options.warm_up else []
    if not warm_up:
        prompts, warm_up = prompts[: -sum(sizes)], prompts[-sum(sizes) :]
    has_lookups = bool(set(names) - WITHOUT_LOOKUP)
    large = [size for size in sizes if size > SMALL] if options.large_prompts else []
    small, turn_tokens = [size for size in sizes if size not in large], options.turn_tokens
    runs = plan(small, options.repeats, prompts, warm_up, has_lookups, turn_tokens)
    if large:
        others = read_prompts(options.large_prompts, options.model, longest)
        runs += plan(large, options.repeats, others[: -sum(large)], others[-sum(large) :], has_lookups, turn_tokens)
    return runs


def main() -> None:
    started = time.perf_counter()
    options = parse()
    if options.child:
        serve(options.child, options)
        return
    names = options.contenders.split(",")
    if unknown := set(names) - set(CONTENDERS):
        sys.exit(f"unknown contenders: {', '.join(sorted(unknown))}; choose from {', '.join(CONTENDERS)}")
    if not options.draft and set(names) & NEED_DRAFT:
        sys.exit(f"{', '.join(sorted(set(names) & NEED_DRAFT))}: give --draft")
    if "paceline_head" in names and not options.head_model:
        sys.exit("paceline_head: give --head-model")
    if small := [name for name in names if not sizes_of(name, options)]:
        sys.exit(f"{', '.join(small)}: give a size of at most 64, or name them in --large")
    options.logs.mkdir(parents=True, exist_ok=True)
    try:
        runs = plan_runs(names, options)
    except NotEnoughPrompts as problem:
        sys.exit(str(problem))
    if options.device != "cpu":
        print_memory(names, options)
    children: dict[str, Child] = {}
    try:
        measurement = Measurement(names, start(names, options, children), options, started)
        measurement.time_runs([run for run in runs if run.index == 0])
        measurement.time_runs([run for run in runs if run.index > 0])
        print("", tables(measurement.outcomes), f"{time.perf_counter() - started:.0f} s", sep="\n\n", flush=True)
        if options.out:
            options.out.write_text(json.dumps([outcome._asdict() for outcome in measurement.outcomes]), "utf-8")
    finally:
        for child in children.values():
            child.terminate()
        for child in children.values():
            child.stop()


if __name__ == "__main__":
    main()

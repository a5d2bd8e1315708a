"""First tokens of short prompts while one tenant sends long prompts without a pause, and streams decode.

    python benchmarks/neighbours/line.py [--against OTHER_TREE/src] [--rounds 2]
    python benchmarks/neighbours/line.py --device cuda --model "inflate:llama-8b?base=smollm2&noise=0.06" --long 8000

Streams decode from the first second to the last. Short prompts arrive at random times, at the same ones in every run, first
without long prompts (quiet) and then with them (busy). Prompts are random tokens, so that none is cached. With --against the
two trees run in turn, each in a process of its own.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed. NaN without values."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else float("nan")


class Load:
    """Requests to one engine, with the times of their tokens."""

    def __init__(self, llm: Any, options: argparse.Namespace) -> None:
        self._llm, self._options = llm, options
        self._random = random.Random(7)
        self.gaps: list[float] = []
        """Times between two outputs of a stream."""
        self.per_token: list[float] = []
        """Mean time of a token of each stream, over the phase."""

    def prompt(self, length: int) -> list[int]:
        return [self._random.randrange(1000, 20_000) for _ in range(length)]

    def outputs(self, length: int, max_tokens: int) -> AsyncIterator[Any]:
        from paceline.core.request import SamplingParams

        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        outputs: AsyncIterator[Any] = self._llm.astream(self.prompt(length), sampling)
        return outputs

    async def first_token(self, length: int, max_tokens: int) -> float:
        began, first = time.perf_counter(), None
        async for _ in self.outputs(length, max_tokens):
            first = first or time.perf_counter() - began
        assert first is not None
        return first

    async def stream(self, stop: asyncio.Event, counted: asyncio.Event) -> None:
        """Decode until `stop`. Counts what comes after `counted` is set."""
        tokens, first, last = 0, None, None
        async for output in self.outputs(32, self._options.context - 64):
            now = time.perf_counter()
            if counted.is_set():
                if first is None:
                    first = now
                else:
                    tokens += len(output.tokens)
                    self.gaps.append(now - last)
            last = now
            if stop.is_set():
                break
        if tokens:
            self.per_token.append((last - first) / tokens)

    async def send_long(self, stop: asyncio.Event, times: list[float]) -> None:
        while not stop.is_set():
            times.append(await self.first_token(self._options.long, 4))

    def long_rows(self) -> int:
        """Prompt tokens of unfinished long prompts that are computed."""
        rows = 0
        for sequence in [*self._llm.engine.scheduler.running]:
            if sequence.num_prompt == self._options.long:
                rows += min(sequence.num_computed, sequence.num_prompt)
        return rows

    async def phase(self, seconds: float, is_busy: bool) -> dict[str, float]:
        """Short prompts for so many seconds, with streams, and with long prompts if it is busy."""
        options, stop, counted = self._options, asyncio.Event(), asyncio.Event()
        self.gaps, self.per_token = [], []
        arrivals = random.Random(11)
        streams = [asyncio.create_task(self.stream(stop, counted)) for _ in range(options.streams)]
        await asyncio.sleep(options.settle)
        stop_long, long_times = asyncio.Event(), list[float]()
        long = []
        if is_busy:
            long = [asyncio.create_task(self.send_long(stop_long, long_times)) for _ in range(options.tenants)]
            await asyncio.sleep(options.settle)
        counted.set()
        began, rows, done = time.perf_counter(), self.long_rows(), len(long_times)
        shorts = []
        while time.perf_counter() < began + seconds:
            shorts.append(asyncio.create_task(self.first_token(options.short, options.tokens)))
            await asyncio.sleep(arrivals.expovariate(options.rate))
        took = time.perf_counter() - began
        computed = self.long_rows() - rows + (len(long_times) - done) * options.long
        counted.clear()
        stop_long.set()
        ttft = list(await asyncio.gather(*shorts))
        stop.set()
        for task in long:
            task.cancel()
        await asyncio.gather(*streams, *long, return_exceptions=True)
        return {
            "shorts": len(ttft),
            "ttft_p50": percentile(ttft, 0.5),
            "ttft_p99": percentile(ttft, 0.99),
            "tpot_p50": statistics.median(self.per_token),
            "tpot_p99": percentile(self.per_token, 0.99),
            "gap_p99": percentile(self.gaps, 0.99),
            "long_rate": computed / took,
        }


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    from paceline import LLM

    engine = {"device": options.device, "draft": options.draft, "max_model_len": options.context}
    engine |= json.loads(options.engine)
    with LLM(options.model, audit_fraction=0.0, **engine) as llm:
        llm.warm_up()
        llm.finish_idle_work()

        async def phases() -> dict[str, dict[str, float]]:
            load = Load(llm, options)
            await load.first_token(options.short, 4)
            quiet = await load.phase(options.quiet or options.seconds, is_busy=False)
            return {"quiet": quiet, "busy": await load.phase(options.seconds, is_busy=True)}

        return asyncio.run(phases())


def measure_tree(source: Path, arguments: list[str]) -> dict[str, dict[str, float]]:
    environment = os.environ | {"PYTHONPATH": str(source)}
    command = [sys.executable, __file__, "--child", *arguments]
    lines = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    results: dict[str, dict[str, float]] = json.loads(lines[-1])
    return results


def row(name: str, seen: dict[str, float]) -> str:
    times = [f"{seen[key]:.3f}" for key in ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "gap_p99")]
    return f"| {name} | {seen['shorts']:.0f} | {' | '.join(times)} | {seen['long_rate']:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", default="{}", help="further fields of EngineConfig, in JSON")
    parser.add_argument("--context", type=int, default=8192, help="max_model_len; streams decode up to it")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--short", type=int, default=200, help="tokens of a short prompt")
    parser.add_argument("--long", type=int, default=7197, help="tokens of a long prompt")
    parser.add_argument("--tenants", type=int, default=1, help="long prompts that are always there")
    parser.add_argument("--tokens", type=int, default=8, help="output tokens of a short prompt")
    parser.add_argument("--rate", type=float, default=0.5, help="short prompts per second")
    parser.add_argument("--quiet", type=float, help="length of the phase without long prompts; default --seconds")
    parser.add_argument("--seconds", type=float, default=90.0, help="length of a phase")
    parser.add_argument(
        "--settle", type=float, default=5.0, help="seconds before streams, and long prompts, are counted"
    )
    parser.add_argument("--against", type=Path, metavar="SRC", help="src folder of another tree: measure both")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options)))
        return
    trees = {"after": ROOT / "src"} if options.against is None else {"before": options.against, "after": ROOT / "src"}
    print("| | shorts | TTFT p50 | p99 | TPOT p50 | p99 | gap p99 | long tokens/s |\n|---|---|---|---|---|---|---|---|")
    for _ in range(options.rounds):
        for name, source in trees.items():
            results = measure_tree(source, sys.argv[1:])
            for phase, seen in results.items():
                print(row(f"{name}, {phase}", seen), flush=True)


if __name__ == "__main__":
    main()

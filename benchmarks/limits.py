"""Throughput and waiting times for several limits of the batch: the figures behind the defaults by device.

    python benchmarks/limits.py --prompts spec_bench_dev.jsonl --clients 16 --limits 64,256 64,512 64,1024 [--rounds 3]

Every client sends its next request when its text ends. A limit is `max_num_seqs,max_batched_tokens`; `none,none` takes the
defaults. Limits alternate within a round. *CPU tok/s* are tokens per second of processor time, which other load affects less.
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from paceline import LLM, SamplingParams

LONGEST = 2500
"""Characters of the longest prompt."""


class Run(NamedTuple):
    rate: float
    cpu_rate: float
    ttft: float
    slow_ttft: float
    tpot: float


async def request(llm: LLM, text: str, tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and seconds per later token."""
    began, times = time.perf_counter(), list[float]()
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    async for _ in llm.astream([{"role": "user", "content": text}], sampling, speculation={"enabled": False}):
        times.append(time.perf_counter())
    return times[0] - began, (times[-1] - times[0]) / (tokens - 1)


async def measure(llm: LLM, texts: list[str], clients: int, tokens: int) -> Run:
    """Two requests of every client, one after the other."""
    waits: list[tuple[float, float]] = []

    async def client(number: int) -> None:
        for text in texts[2 * number :][:2]:
            waits.append(await request(llm, text, tokens))

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(client(number) for number in range(clients)))
    seconds, cpu, total = time.perf_counter() - began, time.process_time() - cpu, len(waits) * tokens
    first = sorted(ttft for ttft, _ in waits)
    tpot = statistics.median(tpot for _, tpot in waits)
    return Run(total / seconds, total / cpu, statistics.median(first), first[int(0.95 * len(first))], tpot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=Path, required=True, help="spec_bench_dev.jsonl, see benchmarks/engine.md")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limits", nargs="+", default=["none,none"])
    options = parser.parse_args()
    texts = [json.loads(line)["turns"][0] for line in options.prompts.read_text("utf-8").splitlines()]
    texts = [text for text in texts if len(text) < LONGEST]
    texts *= 1 + 2 * options.clients // len(texts)
    engines: dict[str, LLM] = {}
    for limits in options.limits:
        sequences, rows = (None if part == "none" else int(part) for part in limits.split(","))
        fixed = {"draft": None, "prefix_caching": False, "max_num_seqs": sequences, "max_batched_tokens": rows}
        engines[limits] = LLM(options.model, **fixed)
    runs: dict[str, list[Run]] = {limits: [] for limits in engines}
    for round_ in range(options.rounds):
        for limits in list(engines)[:: -1 if round_ % 2 else 1]:
            found = asyncio.run(measure(engines[limits], texts, options.clients, options.tokens))
            runs[limits].append(found)
            print(f"round {round_}, {limits}: {found.rate:.1f} tok/s", flush=True)
    print(
        "| limits | clients | tok/s | CPU tok/s | TTFT, s | TTFT p95, s | time per token, ms |\n|---|---|---|---|---|---|---|"
    )
    for limits, some in runs.items():
        one = Run(*(statistics.median(column) for column in zip(*some, strict=True)))
        figures = f"{one.rate:.1f} | {one.cpu_rate:.1f} | {one.ttft:.2f} | {one.slow_ttft:.2f} | {1e3 * one.tpot:.0f}"
        print(f"| {limits} | {options.clients} | {figures} |")
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    main()

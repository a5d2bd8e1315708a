"""One table of the CPU kernels on the host of a GPU server, in two minutes.

    PYTHONPATH=src python benchmarks/cpu_host.py [--threads 1 2 4 8 16] [--model smollm2] [--seconds 110]

It checks that AMX and the vector instructions give the same bits, then measures passes of 1 to 32 rows, prompts, and plain
and speculative decoding of the embedded model, each by the number of threads. It needs torch, safetensors, tokenizers and a C
compiler (gcc, clang, or the package ziglang), and no network. After `--seconds` it starts no further measurement.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from cpu_rows import CHECKSUMS, FEATURES, PROMPTS, ROWS

from paceline import LLM, SamplingParams
from paceline.core.machine import cpu_name, usable_cores
from paceline.kernels.cpu import native
from paceline.models.loading.load import load_model
from paceline.models.runner import ModelRunner, Span

SETS = ("avx2", "avx512-vnni", "amx")
TEXTS = (
    "Write a short story about a lighthouse keeper who finds a map.",
    "Explain how a bicycle stays upright, step by step.",
    "Write a Python function that returns the prime numbers below n.",
    "List ten capital cities of Europe with one fact about each.",
)
TOKENS = 64
REPEATS = 5


def start_checks(model: str) -> dict[str, subprocess.Popen[str]]:
    """A process for each instruction set of this CPU that prints the checksums of its products. They compile in parallel."""
    words = set(Path("/proc/cpuinfo").read_text().split())
    program = CHECKSUMS.replace('"smollm2"', repr(model))
    return {
        name: subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PACELINE_INSTRUCTIONS": name},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in SETS
        if FEATURES[name] in words
    }


def report_checks(checks: dict[str, subprocess.Popen[str]]) -> None:
    sums: dict[str, str] = {}
    for name, process in checks.items():
        out, error = process.communicate()
        if process.returncode:
            print(f"{name:12} cannot run: {(error.strip().splitlines() or ['no message'])[-1]}", flush=True)
            continue
        used, _, sums[name] = out.strip().partition(", [")
        same = "the same bits" if sums[name] == next(iter(sums.values())) else "OTHER BITS"
        print(f"{name:12} {used[1:]:30} {same}", flush=True)


def pass_times(runner: ModelRunner) -> list[str]:
    """Cells of a table row: ms of passes of R rows behind 64 tokens with the multiple of one row, and tokens/s of prompts."""

    def seconds(rows: int, context: int, logits: int, repeats: int) -> float:
        span = Span(list(range(1, 2 + (context + rows) // 16)), context, [5] * rows, logits)
        best = float("inf")
        for _ in range(repeats):
            started = time.perf_counter()
            runner.forward([span])
            best = min(best, time.perf_counter() - started)
        return best

    times = {rows: seconds(rows, 64, rows, 2 * REPEATS) for rows in ROWS}
    cells = [f"{times[rows] * 1e3:.2f} ({times[rows] / times[1]:.1f})" for rows in ROWS]
    return [*cells, *(f"{rows / seconds(rows, 0, 1, 2):.0f}" for rows in PROMPTS)]


def decode_rates(model: str, draft: str) -> tuple[float, float]:
    """Tokens/s of one stream over all texts, plain and with drafts, in turns. The texts must be equal."""
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    spent = {False: 0.0, True: 0.0}
    with LLM(model, draft=draft, device="cpu", prefix_caching=False, max_num_seqs=8) as llm:
        for number, text in enumerate((TEXTS[0], *TEXTS)):  # the first one warms up
            answers = []
            for enabled in (False, True):
                started = time.perf_counter()
                answers.append(llm.generate([text], sampling, speculation={"enabled": enabled})[0].text)
                spent[enabled] += (time.perf_counter() - started) * (number > 0)
            if answers[0] != answers[1]:
                sys.exit("speculation changed the text")
    return tuple(len(TEXTS) * TOKENS / spent[enabled] for enabled in (False, True))  # type: ignore[return-value]  # two


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", default="smollm2-eagle")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=110.0)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    counts = [count for count in options.threads if count <= usable_cores()]
    if not native.available():
        sys.exit("no native kernels: install a C compiler")
    print(f"{cpu_name()}, {usable_cores()} usable cores, {native.instructions()}", flush=True)
    report_checks(start_checks(options.model))
    torch.set_num_threads(1)
    runner = ModelRunner(load_model(options.model).model, 100)
    print("\nms of a pass of R rows behind 64 tokens (times one row); prompts in tokens/s")
    print(f"| threads | {' | '.join(map(str, ROWS))} | {' | '.join(f'prompt {n}' for n in PROMPTS)} |")
    print("|---" * (1 + len(ROWS) + len(PROMPTS)) + "|", flush=True)
    for count in counts:
        if time.monotonic() < deadline:
            native.set_num_threads(count)
            print(f"| {count} | {' | '.join(pass_times(runner))} |", flush=True)
    print(f"\n{len(TEXTS)} texts of {TOKENS} new tokens, one stream, prompts included")
    print("| threads | plain, tokens/s | EAGLE head, tokens/s | gain |\n|---|---|---|---|", flush=True)
    for count in counts:
        if time.monotonic() < deadline:
            native.set_num_threads(count)
            plain, drafted = decode_rates(options.model, options.draft)
            print(f"| {count} | {plain:.1f} | {drafted:.1f} | {drafted / plain:.2f} |", flush=True)


if __name__ == "__main__":
    main()

"""Tokens per second from the first request on, as a batch job has them: `LLM(...)`, `warm_up()`, `generate`. Nothing waits for
graphs that are captured in idle moments.

    python benchmarks/neighbours/first_minute.py --model "inflate:llama-8b?base=smollm2&noise=0.06" --draft smollm2
    python benchmarks/neighbours/first_minute.py --model FOLDER --draft FOLDER --depths 1 2 3 4 5 6

Plain decoding and `goodput` (and each fixed depth) have a process of their own and run the same sizes in the same order. A step
is slow if it takes more than three times the median of the steps with as many slots, rows and prompt rows. A thread samples the
stack of the engine's thread, and each slow step is named by the innermost lines of the project that most of its samples have.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from paceline.engine.hook import StepHook

SLOW = 3.0
SAMPLE_SECONDS = 0.004
RARE_PROMPTS = 0.25
"""Seconds that prompts may add to a step if few steps computed as many prompt rows."""
WINDOW = 2.0
"""Seconds of a window, of which the slowest counts."""
TEXTS = Path(__file__).resolve().parents[2] / "src/paceline"


class Steps(StepHook):
    """The times of all steps, and the stacks of the engine's thread."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float, tuple[Any, ...], int]] = []
        """Begin and end of a step, its kind, and its tokens."""
        self.samples: list[tuple[float, str]] = []
        self._thread: int | None = None
        self._last: float | None = None
        threading.Thread(target=self._sample, daemon=True).start()

    def begin(self) -> None:
        self._last = None

    def committed(self, result: Any) -> None:
        self._thread = threading.get_ident()
        now = time.perf_counter()
        prompt_rows = sum(each.num_tokens for each in result.sequences if each.num_tokens > 1)
        tokens = sum(len(each.verdict.tokens) for each in result.sequences if each.verdict is not None)
        kind = result.is_graph, result.slots, result.rows, prompt_rows and 1 << prompt_rows.bit_length()
        if self._last is not None:
            self.times.append((self._last, now, kind, tokens))
        self._last = now

    def _sample(self) -> None:
        while True:
            time.sleep(SAMPLE_SECONDS)
            frame = sys._current_frames().get(self._thread or 0)
            lines = []
            if frame is not None and "paceline/" not in (name := frame.f_code.co_filename):
                lines.append(f"{'/'.join(name.split('/')[-2:])}:{frame.f_code.co_name}")
            while frame is not None and len(lines) < 6:
                name = frame.f_code.co_filename
                if "paceline/" in name and "/cli/" not in name:
                    lines.append(f"{name.rpartition('paceline/')[2]}:{frame.f_code.co_name}")
                frame = frame.f_back
            self.samples.append((time.perf_counter(), " < ".join(lines)))

    def slow(self, begin: float) -> list[tuple[float, float, tuple[Any, ...], str]]:
        """(seconds, median of its kind, kind, what it did) of every slow step that began after `begin`."""
        by_kind = defaultdict(list)
        for start, end, kind, _ in self.times:
            by_kind[kind].append(end - start)
        usual = {kind: median(values) for kind, values in by_kind.items()}
        some = {kind[:2]: min(usual[other] for other in usual if other[:2] == kind[:2]) for kind in usual}
        """A kind of which few steps ran is compared with others of as many slots and rows."""
        found = []
        for start, end, kind, _ in self.times:
            is_known = len(by_kind[kind]) > 4
            expected = usual[kind] if is_known else some[kind[:2]]
            more = RARE_PROMPTS if kind[3] and not is_known else 0.005
            if start >= begin and end - start > max(SLOW * expected, expected + more):
                stacks = Counter(text for at, text in self.samples if start <= at <= end)
                common = [f"{count} of {stacks.total()} samples: {text}" for text, count in stacks.most_common(5)]
                found.append((end - start, expected, kind, "\n      ".join(["", *common])))
        return found


def prompts(llm: Any, count: int) -> list[str]:
    """Python files of the project, from different lines on: text that a small model knows how to continue."""
    files = sorted(TEXTS.rglob("*.py"), key=lambda file: -file.stat().st_size)
    return ["\n".join(file.read_text().splitlines()[8:48]) for file in files[:count]]


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("paceline.core.machine").setLevel(logging.INFO)
    from paceline import LLM
    from paceline.core.request import SamplingParams

    steps, rows, speculation = Steps(), [], {"max_depth": options.max_depth}
    began = time.perf_counter()
    fixed = options.child not in ("plain", "goodput")
    if fixed:
        speculation = {"depth": "fixed", "max_depth": int(options.child)}
    elif options.child == "plain":
        speculation = {"max_depth": 0}
    llm = LLM(
        options.model, draft=options.draft, device=options.device, hooks=(steps,),
        max_num_seqs=max(options.sizes), max_model_len=2048, audit_fraction=0.0, speculation=speculation,
        **json.loads(options.engine),
    )  # fmt: skip
    llm.warm_up()
    print(f"{options.child}: start {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    texts = prompts(llm, max(options.sizes))
    for temperature in options.temperatures:
        for size in options.sizes:
            for turn in range(options.turns):
                sampling = [
                    SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=i, ignore_eos=True)
                    for i in range(size)
                ]
                steps.begin()
                first, start = len(steps.times), time.perf_counter()
                llm.generate(texts[:size], sampling)
                seconds = time.perf_counter() - start
                taken = steps.times[first:]
                slow = steps.slow(start)
                drafts = sum(1 for _, _, kind, _ in taken if kind[1] and kind[2] > kind[1])
                rows.append(
                    {
                        "size": size, "temperature": temperature, "turn": turn, "rate": size * options.tokens / seconds,
                        "window": slowest(taken), "slow": len(slow), "lost": sum(a - b for a, b, _, _ in slow) / seconds,
                        "graph": sum(kind[0] for _, _, kind, _ in taken) / max(1, len(taken)),
                        "drafted": drafts / max(1, len(taken)),
                    }
                )  # fmt: skip
                for took, expected, kind, stack in slow[:6]:
                    print(f"  {options.child} {size} T{temperature} #{turn}: {1000 * took:.0f} ms for {1000 * expected:.1f}, "
                          f"{kind}: {stack}", file=sys.stderr, flush=True)  # fmt: skip
    return rows


def slowest(steps: list[tuple[float, float, tuple[Any, ...], int]]) -> float:
    """Tokens per second in the slowest window. NaN if all took less than two windows."""
    if not steps or steps[-1][1] - steps[0][0] < 2 * WINDOW:
        return float("nan")
    rates, first = list[float](), 0
    for last, (_, end, _, _) in enumerate(steps):
        while first < last and end - steps[first + 1][0] >= WINDOW:
            first += 1
        if end - steps[first][0] >= WINDOW:
            rates.append(sum(tokens for _, _, _, tokens in steps[first : last + 1]) / (end - steps[first][0]))
    return min(rates, default=float("nan"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--engine", default="{}", help="further fields of EngineConfig, in JSON")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64, 128, 64, 32, 16, 8, 4, 1])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--turns", type=int, default=2, help="batches of a size in a row")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--max-depth", type=int, default=8)
    parser.add_argument("--depths", type=int, nargs="*", default=[], help="fixed depths to measure too")
    parser.add_argument("--only", choices=["plain", "goodput"], help="run this kind alone, without a table")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.child = options.child or options.only
    if options.child:
        print(json.dumps(measure(options)))
        return
    kinds = ["plain", "goodput", *map(str, options.depths)]
    found = {}
    for kind in kinds:
        run = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--child", kind], check=True, stdout=subprocess.PIPE, text=True,
            env=os.environ,
        )  # fmt: skip
        found[kind] = json.loads(run.stdout.splitlines()[-1])
    print("| size, T, turn | plain tok/s | " + " | ".join(f"{kind} / plain" for kind in kinds[1:]), end="")
    print(" | slowest window / plain | slow steps (time lost) | steps in graphs | steps with drafts |")
    print("|---" * (len(kinds) + 5) + "|")
    for i, plain in enumerate(found["plain"]):
        shares = " | ".join(f"{found[kind][i]['rate'] / plain['rate']:.2f}" for kind in kinds[1:])
        own = found["goodput"][i]
        print(
            f"| {plain['size']}, {plain['temperature']}, {plain['turn']} | {plain['rate']:.0f} | {shares} | "
            f"{own['window'] / plain['rate']:.2f} | {own['slow']} ({own['lost']:.2f}) | "
            f"{own['graph']:.3f} | {own['drafted']:.2f} |"
        )


if __name__ == "__main__":
    main()

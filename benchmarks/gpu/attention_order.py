"""Attention on a GPU: whether a row has the same bits in every form of a pass, and the time next to another source tree.

    python benchmarks/gpu/attention_order.py --against OTHER/src --out TABLE.md

Shape of an 8B Llama: 32 query and 8 key-value heads of 128, bf16, blocks of 16 tokens. *Bits* compares float32 outputs of rows
decoded alone with batches, splits, tiles, verification, prompts in chunks, and trees with the paths of their nodes. *Times*:
one layer in a CUDA graph over several cold caches; the two trees take turns, each in a process of its own. Other processes
compile all kernels before, and compare the bits. With `--sweep` the times of other tiles and splits are measured too.
"""

import argparse
import inspect
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.formats.layout import LongPrompt
from paceline.kernels.gpu.attention import plan as plans
from paceline.kernels.gpu.attention.paged import paged_attention
from paceline.kernels.gpu.attention.plan import AttentionPlan, AttentionScratch, attention_plan
from paceline.kernels.gpu.attention.prompts import attend_long_prompt

HEADS, KV_HEADS, WIDTH, PAGE = 32, 8, 128, 16
SCALE, LONGEST = WIDTH**-0.5, 131072 + 2048
BANDWIDTH = 4.3e12
"""Bytes per second of a large copy on an H200."""
COLD_BYTES, MOST_BYTES = 300_000_000, 9_000_000_000
PARENTS = (-1, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 5, 5, 5, 6, 8, 8, 11, 11, 11, 12, 15, 17, 17, 17, 18, 21, 22, 22, 26, 27)
"""A tree of 31 nodes, 10 levels deep, as an EAGLE head grows it."""
ROUNDS = 3
COMPILERS = 7
"""Processes that compile for one source tree."""


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    """`chain`, `tree` or `prompt`."""
    sequences: int
    rows: int
    context: int
    tile: int | None = None
    splits: int | None = None

    @property
    def num_bytes(self) -> int:
        return 4 * self.sequences * (self.context + self.rows) * KV_HEADS * WIDTH


def cases() -> Iterator[Case]:
    for context, count in itertools.product((512, 2048, 8192, 32768), (1, 8, 32, 64, 256)):
        yield Case("chain", count, 1, context - 1)
    for rows, context, count in itertools.product((8, 17), (512, 2048, 8192, 32768), (1, 8, 64)):
        yield Case("chain", count, rows, context - rows)
    for context, count in itertools.product((512, 2048, 8192), (1, 8, 64)):
        yield Case("tree", count, 1 + len(PARENTS), context)
    for rows, context in ((2048, 0), (2048, 6144), (8064, 0), (8064, 24192)):
        yield Case("prompt", 1, rows, context)


def sweep() -> Iterator[Case]:
    """Tiles and splits other than the plan's."""
    for context, count in ((512, 1), (2048, 1), (8192, 1), (32768, 1), (2048, 8), (8192, 8), (2048, 32)):
        for splits in (1, 2, 4, 8, 16, 32):
            yield Case("chain", count, 1, context - 1, splits=splits)
    for context, count in ((2048, 1), (2048, 8), (2048, 64), (8192, 8)):
        for tile, splits in itertools.product((16, 32, 64), (1, 2, 8)):
            yield Case("chain", count, 8, context - 8, tile, splits)
        for tile, splits in itertools.product((32, 64, 128), (1, 2, 8)):
            yield Case("chain", count, 17, context - 17, tile, splits)
            yield Case("tree", count, 1 + len(PARENTS), context, tile, splits)


def masks() -> list[int]:
    """Ancestors of row 0, the last committed token, and of the nodes after it."""
    found = [1]
    for i, parent in enumerate(PARENTS):
        found.append(found[1 + parent] | 2 << i)
    return found


def make_plan(case: Case, scratch: AttentionScratch | None = None) -> AttentionPlan:
    """With the parameters that this source tree has."""
    known = inspect.signature(attention_plan).parameters
    given: dict[str, Any] = {
        "longest": LONGEST,
        "is_uniform": case.kind != "prompt",
        "is_tree": case.kind == "tree",
        "tile": case.tile,
        "num_splits": case.splits,
        "scratch": scratch,
    }
    named = {name: value for name, value in given.items() if name in known}
    named |= {"num_rows": case.sequences * case.rows, "num_sequences": case.sequences, "max_rows": case.rows}
    return attention_plan(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=WIDTH, device="cuda", **named)


class Timer:
    """Times of the cases in this process."""

    def __init__(self, all_cases: list[Case]) -> None:
        self._cases = all_cases
        self._pool: list[Tensor] = []
        self._runs: dict[int, tuple[Callable[[], object], int]] = {}
        self._scratch = AttentionScratch("cuda")

    def take(self, elements: int) -> list[Tensor]:
        if not self._pool or len(self._pool[0]) < elements:
            self._pool.clear()
            self._pool += [torch.empty(elements, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2)]
        return self._pool

    def passes(self, case: Case, is_cold: bool = True) -> tuple[list[Callable[[], object]], int]:
        """The pass over several caches, and their number."""
        blocks_each = -(-(case.context + case.rows) // PAGE)
        elements = case.sequences * blocks_each * PAGE * KV_HEADS * WIDTH
        count = max(1, min(24, -(-COLD_BYTES // case.num_bytes))) if is_cold else 1
        pool = self.take(count * elements)
        shape = case.sequences * blocks_each, PAGE, KV_HEADS, WIDTH
        parts = [part[: count * elements].view(count, *shape).unbind() for part in pool]
        caches = list(zip(*parts, strict=True))
        q = torch.randn(case.sequences * case.rows, HEADS, WIDTH, device="cuda").bfloat16()
        table = torch.randperm(shape[0], device="cuda").to(torch.int32).view(case.sequences, blocks_each)
        out = torch.empty(len(q), HEADS * WIDTH, dtype=q.dtype, device="cuda")
        if case.kind == "prompt" and case.rows > 2048:
            prompt = LongPrompt(0, 0, case.rows, case.context)
            return [
                partial(attend_long_prompt, q, keys, values, table, prompt, SCALE, out) for keys, values in caches
            ], count
        plan = make_plan(case, self._scratch)
        starts = torch.arange(0, len(q) + 1, case.rows, dtype=torch.int32, device="cuda")
        contexts = torch.full((case.sequences,), case.context, dtype=torch.int32, device="cuda")
        marks = torch.tensor(masks() * case.sequences, device="cuda") if case.kind == "tree" else None
        return [
            partial(paged_attention, q, keys, values, starts, contexts, table, plan, SCALE, marks, out=out)
            for keys, values in caches
        ], count

    def run_once(self, case: Case) -> None:
        """Compile the kernels of a case. They do not depend on the length of the context."""
        passes, _ = self.passes(Case(**{**asdict(case), "context": 64 if case.context else 0}), is_cold=False)
        passes[0]()
        torch.cuda.synchronize()

    def seconds(self, number: int) -> float:
        """Of one layer of a case."""
        if number not in self._runs:
            self._runs.clear()
            passes, count = self.passes(self._cases[number])
            for each in passes[:2]:
                each()
            torch.cuda.synchronize()
            if self._cases[number].rows > 2048:  # not captured: it allocates
                self._runs[number] = (lambda: [each() for each in passes]), count
            else:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for each in passes:
                        each()
                self._runs[number] = graph.replay, count
        run, count = self._runs[number]
        run()
        found = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) * 1e-3 / count)
        return median(found)


def work(task: str) -> None:
    """A process of its own: compiles its share of the cases, or times cases whose numbers it reads."""
    kind, *share = task.split(":")
    if kind in COMPARISONS:
        torch.manual_seed(0)
        COMPARISONS[kind](share[0])
        return
    found = [*cases(), *(sweep() if kind.endswith("sweep") else ())]
    timer = Timer(found)
    if share:
        index, of = map(int, share)
        seen: dict[tuple[object, ...], Case] = {}
        for case in found:
            key = case.kind, case.sequences, case.rows, case.tile, case.splits, case.rows > 2048
            seen.setdefault(key, case)
        for case in list(seen.values())[index::of]:
            timer.run_once(case)
        return
    timer.take(max(case.num_bytes for case in found if case.num_bytes <= MOST_BYTES) // 4 + COLD_BYTES // 2)
    print("ready", flush=True)
    for line in sys.stdin:
        print(timer.seconds(int(line)), flush=True)


def start(source: Path, task: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, __file__, "--work", task]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def start_compilers(sources: list[Path], suffix: str) -> list[subprocess.Popen[str]]:
    return [start(source, f"compile{suffix}:{i}:{COMPILERS}") for source in sources for i in range(COMPILERS)]


def compare_times(sources: list[Path], suffix: str) -> list[str]:
    """Rows of the table."""
    timers = [start(source, f"time{suffix}") for source in sources]
    for process in timers:
        assert process.stdout.readline() == "ready\n"  # type: ignore[union-attr]

    def ask(process: subprocess.Popen[str], number: int) -> float:
        process.stdin.write(f"{number}\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        return float(process.stdout.readline())  # type: ignore[union-attr]

    lines = [
        "| pass | sequences | rows | keys | us | floor, us | other tree, us | share of its speed |",
        "|---" * 8 + "|",
    ]
    number_of_cases = len([*cases()])
    for number, case in enumerate([*cases(), *(sweep() if suffix == "sweep" else ())]):
        if case.num_bytes > MOST_BYTES:
            continue
        asked = timers[:1] if number >= number_of_cases else timers
        taken: list[list[float]] = [[] for _ in asked]
        for _ in range(ROUNDS):
            for process, seconds in zip(asked, taken, strict=True):
                seconds.append(ask(process, number))
        ours, *other = (1e6 * median(seconds) for seconds in taken)
        floor = 1e6 * case.num_bytes / BANDWIDTH
        chosen = "" if case.splits is None else f", {case.tile or 'its'} tile, {case.splits} splits"
        theirs = f"{other[0]:.1f} | {other[0] / ours:.3f}" if other else " | "
        keys = case.context + case.rows
        lines.append(
            f"| {case.kind}{chosen} | {case.sequences} | {case.rows} | {keys} | {ours:.1f} | {floor:.1f} | {theirs} |"
        )
        print(lines[-1], flush=True)
    for process in timers:
        process.stdin.close()  # type: ignore[union-attr]
        process.wait()
    return lines


class Bits:
    """Compares rows of one sequence in many forms with plain decoding."""

    def __init__(self, length: int, count: int, window: int | None, has_sinks: bool, dtype: torch.dtype) -> None:
        self.length, self.count, self.window = length, count, window
        blocks = -(-length // PAGE) + 6
        self.table = torch.randperm(blocks, device="cuda").to(torch.int32)[None]
        self.cache = [torch.randn(blocks, PAGE, KV_HEADS, WIDTH, device="cuda").to(dtype) for _ in range(2)]
        self.q = (3 * torch.randn(count, HEADS, WIDTH, device="cuda")).bfloat16()
        self.sinks = torch.randn(HEADS, device="cuda").bfloat16() if has_sinks else None

    def rows(
        self,
        first: int = 0,
        count: int | None = None,
        tile: int | None = None,
        splits: int | None = None,
        tree: list[int] | None = None,
        cache: list[Tensor] | None = None,
        context: int | None = None,
    ) -> Tensor:
        count = self.count - first if count is None else count
        context = self.length - self.count + first if context is None else context
        case = Case("tree" if tree else "prompt", 1, count, context, tile, splits)
        starts, contexts = (torch.tensor(each, dtype=torch.int32, device="cuda") for each in ([0, count], [context]))
        marks = torch.tensor(tree, device="cuda") if tree else None
        keys, values = cache or self.cache
        return paged_attention(
            self.q[first : first + count], keys, values, starts, contexts, self.table, make_plan(case), SCALE, marks,
            self.window, torch.empty(count, HEADS * WIDTH, device="cuda"), sinks=self.sinks,
        )  # fmt: skip

    def path(self, context: int, path: list[int]) -> Tensor:
        """Plain decoding of the last node of a path."""
        cache, table = [part.clone() for part in self.cache], self.table[0].tolist()
        for depth, node in enumerate(path):
            to, source = ((table[i // PAGE], i % PAGE) for i in (context + depth, context + node))
            for part, old in zip(cache, self.cache, strict=True):
                part[to] = old[source]
        return self.rows(path[-1], 1, cache=cache, context=context + len(path) - 1)


def differing(a: Tensor, b: Tensor) -> float:
    return (a.contiguous().view(torch.int32) != b.contiguous().view(torch.int32)).float().mean().item()


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window of 1,000": {"window": 1000},
    "sinks": {"has_sinks": True},
    "float8 cache": {"dtype": torch.float8_e4m3fn},
}
EVERY_FORM = ((None, None), (16, 4), (32, 16), (64, 2), (128, 8))
"""Tiles and splits."""
SOME_FORMS = EVERY_FORM[:2]


def report(name: str, form: str, share: float) -> None:
    print(f"| {name} | {form} | {share:.3%} |", flush=True)


def compare_rows(name: str) -> None:
    """Print shares of values that differ: rows of a chain in passes of all sizes."""
    options: dict[str, Any] = {"window": None, "has_sinks": False, "dtype": torch.bfloat16, **KINDS[name]}
    forms = SOME_FORMS if KINDS[name] else EVERY_FORM
    for length, count in ((700, 600), (2348, 2048), (9000, 512)):
        bits = Bits(length, count, **options)
        whole, label = bits.rows(), f"{name}, {count} rows of {length} keys"
        some = sorted({0, 1, 63, 64, 65, 255, 256, 257, *range(0, count, 23)})
        plain = torch.cat([bits.rows(row, 1) for row in some])
        report(label, "whole, beside rows decoded alone", differing(whole[some], plain))
        found = [
            differing(torch.cat([bits.rows(row, 1, splits=splits) for row in some[::9]]), plain[::9])
            for splits in ((1, 8) if KINDS[name] else (1, 2, 8, 32))
        ]
        report(label, "decoded by other numbers of programs", max(found))
        for rows in (2, 5, 8, 17, 32):
            found = [
                differing(bits.rows(first, rows, *form), whole[first : first + rows])
                for first in (0, 100, count - rows)
                for form in forms
            ]
            report(label, f"{rows} rows, {len(forms)} tiles and splits", max(found))
        for size in (512, 300, 37):
            chunks = [bits.rows(first, min(size, count - first)) for first in range(0, count, size)]
            report(label, f"chunks of {size}", differing(torch.cat(chunks), whole))
        if not KINDS[name]:
            for tile in (16, 32, 64):
                report(label, f"tile of {tile}", differing(bits.rows(tile=tile, splits=1), whole))
            out, prompt = torch.empty_like(whole), LongPrompt(0, 0, count, length - count)
            attend_long_prompt(bits.q, bits.cache[0], bits.cache[1], bits.table, prompt, SCALE, out)
            report(label, "as a long prompt", differing(out, whole))


def compare_trees(name: str) -> None:
    """The same for the nodes of trees, and the paths that end with them."""
    options: dict[str, Any] = {"window": None, "has_sinks": False, "dtype": torch.bfloat16, **KINDS[name]}
    forms = SOME_FORMS if KINDS[name] else ((None, None), (16, 4), (128, 1), (64, 8))
    for context in (0, 300, 1010, 2043, 8190):
        bits, tree = Bits(context + 32, 32, **options), masks()
        expected = torch.cat([bits.path(context, [i for i in range(32) if mask >> i & 1]) for mask in tree])
        found = [differing(bits.rows(tile=tile, splits=splits, tree=tree), expected) for tile, splits in forms]
        report(f"{name}, tree of 31 after {context} keys", f"paths decoded, {len(forms)} tiles and splits", max(found))


def compare_batch(_: str) -> None:
    """The same for 64 sequences in one pass, and each alone."""
    lengths = torch.randint(20, 9000, (64,)).tolist()
    sequences = [Bits(length, 1, None, False, torch.bfloat16) for length in lengths]
    sizes = [each.cache[0].shape[0] for each in sequences]
    table = torch.zeros(64, max(sizes), dtype=torch.int32, device="cuda")
    for i, each in enumerate(sequences):
        table[i, : sizes[i]] = each.table[0] + sum(sizes[:i])
    cache = [torch.cat([each.cache[part] for each in sequences]) for part in range(2)]
    starts = torch.arange(65, dtype=torch.int32, device="cuda")
    contexts = torch.tensor(lengths, device="cuda").to(torch.int32) - 1
    q = torch.cat([each.q for each in sequences])
    alone = torch.cat([each.rows() for each in sequences])
    for splits in (None, 1, 4, 32):
        plan = make_plan(Case("chain", 64, 1, 0, splits=splits))
        out = torch.empty_like(alone)
        paged_attention(q, cache[0], cache[1], starts, contexts, table, plan, SCALE, out=out)
        report("64 sequences of 20 to 9,000 keys", f"together, splits {splits or 'of the plan'}", differing(out, alone))


COMPARISONS = {"rows": compare_rows, "trees": compare_trees, "batch": compare_batch}


def start_bits(source: Path) -> list[subprocess.Popen[str]]:
    tasks = [(part, name) for name in KINDS for part in ("rows", "trees")] + [("batch", "plain")]
    return [start(source, f"{part}:{name}") for part, name in tasks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="src of another source tree")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--no-bits", action="store_true")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return
    began, lines, suffix = time.monotonic(), list[str](), "sweep" if options.sweep else "plain"
    own = Path(plans.__file__).parents[4]
    sources = [own, *([options.against.resolve()] if options.against else [])]
    compilers = [] if options.no_times else start_compilers(sources, suffix)
    comparisons = [] if options.no_bits else start_bits(own)
    found = [line for process in comparisons for line in process.communicate()[0].splitlines()]
    if any(process.wait() for process in [*comparisons, *compilers]):
        raise SystemExit("a pass does not run; see the error above")
    if found:
        wrong = [line for line in found if not line.endswith("| 0.000% |")]
        lines += ["| rows | form | share of values that differ |", "|---|---|---|", *found]
        lines += ["", f"{len(wrong)} of {len(found)} comparisons differ.", ""]
    print("\n".join(lines), f"\n({time.monotonic() - began:.0f} s)\n", flush=True)
    if not options.no_times:
        lines += compare_times(sources, suffix)
    lines.append(f"\n{torch.cuda.get_device_name()}, {time.monotonic() - began:.0f} s.")
    print(lines[-1])
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

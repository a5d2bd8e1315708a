"""Cost of the rows of a decode step and speed of prompts on this CPU, by instruction set, activations and threads.

    python benchmarks/cpu/cpu_rows.py [--repeats 15] [--threads 1 2 4 8 16] [--model smollm2] [--llama-cpp PYTHON] [--unchecked]
                                   [--cpu-time]

First every instruction set of this CPU must give the bits of plain C, for products and for a pass of the model, unless
`--unchecked` leaves this out. The contenders take turns, each in its own process; every figure is the least of all repeats.
`--cpu-time` measures CPU time of the process instead of wall time: with one thread, other programs change it little.
`--llama-cpp` is the path of a Python with `llama-cpp-python`, which loads the same GGUF.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.machine import cpu_name, usable_cores
from paceline.model_files.hub.hub import find_model

ROWS = (1, 2, 4, 8, 16, 32)
PROMPTS = (128, 1024)
FEATURES = {
    "sdot": "asimddp",
    "i8mm": "i8mm",
    "avx2": "avx2",
    "avx-vnni": "avx_vnni",
    "avx512": "avx512bw",
    "avx512-vnni": "avx512_vnni",
    "amx": "amx_int8",
}

CHECKSUMS = """
import hashlib, json, torch
from paceline.kernels.cpu import native
from paceline.kernels.linear import linear, prepare
from paceline.kernels.formats.weights import Grouped
from paceline.models.loading.load import load_model
from paceline.models.runner import ModelRunner, Span
g = torch.Generator().manual_seed(0)
sums = []
for bits in (4, 8):
    for group in (16, 32):
        low, high, dtype = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
        codes = torch.randint(low, high, (200, 576), generator=g).to(dtype)
        scales, offsets = (torch.randn(200, 576 // group, generator=g) for _ in range(2))
        weight = prepare(Grouped(codes, scales, offsets if bits == 4 else None, group), "cpu", torch.float32)
        for rows in (*range(1, 34), 64, 200):
            out = linear(torch.randn(rows, 576, generator=g), weight)
            sums.append(hashlib.sha256(out.numpy().tobytes()).hexdigest()[:16])
runner = ModelRunner(load_model("smollm2").model, 8)
for rows in (1, 5, 20):
    logits = runner.forward([Span([1, 2, 3], 0, list(range(100, 100 + rows)), rows)]).logits
    sums.append(hashlib.sha256(logits.numpy().tobytes()).hexdigest()[:16])
print(json.dumps([native.instructions(), sums]))
"""

PACELINE = """
import json, sys, time, torch
from paceline.kernels.cpu import native
from paceline.models.loading.load import load_model
from paceline.models.runner import ModelRunner, Span
torch.set_num_threads(1)
model = load_model(sys.argv[1], activations=sys.argv[2]).model
native.set_num_threads(int(sys.argv[3]))
runner = ModelRunner(model, 100)
clock = getattr(time, sys.argv[4])
print(json.dumps(native.instructions()), flush=True)
for line in sys.stdin:
    rows, context, logits = json.loads(line)
    blocks = list(range(1, 2 + (context + rows) // 16))
    span = Span(blocks, context, [5] * rows, logits)
    started = clock()
    runner.forward([span])
    print(json.dumps(clock() - started), flush=True)
"""

LLAMA_CPP = """
import json, sys, time
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_ctx=2048, n_batch=1024, n_ubatch=1024, n_threads=int(sys.argv[3]),
            n_threads_batch=int(sys.argv[3]), logits_all=False, verbose=False)
clock = getattr(time, sys.argv[4])
print(json.dumps("llama.cpp"), flush=True)
for line in sys.stdin:
    rows, context, logits = json.loads(line)
    llm.reset()
    if context:
        llm.eval([5] * context)
    started = clock()
    llm.eval([5] * rows)
    print(json.dumps(clock() - started), flush=True)
"""


@dataclass
class Contender:
    """A process that computes a pass on request."""

    label: str
    process: subprocess.Popen[str]
    instructions: str = ""
    best: dict[tuple[int, int], float] = field(default_factory=dict)

    def measure(self, rows: int, context: int, logits: int) -> None:
        seconds = self._ask(json.dumps([rows, context, logits]))
        self.best[rows, context] = min(seconds, self.best.get((rows, context), seconds))

    def _ask(self, line: str) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return float(json.loads(self.process.stdout.readline()))


def start(label: str, python: str, program: str, *arguments: str, instructions: str = "") -> Contender:
    environment = dict(os.environ)
    if instructions:
        environment["PACELINE_INSTRUCTIONS"] = instructions
    command = [python, "-c", program, *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    assert process.stdout is not None
    used = process.stdout.readline()
    if not used:
        sys.exit(f"{label} did not start: run {python} -c '...' by hand to see why")
    return Contender(label, process, json.loads(used))


def check_bits() -> list[str]:
    """Instruction sets of this CPU, after a check of their bits against plain C."""
    words = set(Path("/proc/cpuinfo").read_text().split())
    names = ["portable", *(name for name, feature in FEATURES.items() if feature in words)]
    found = {}
    for name in names:
        environment = {**os.environ, "PACELINE_INSTRUCTIONS": name}
        done = subprocess.run([sys.executable, "-c", CHECKSUMS], env=environment, capture_output=True, text=True)
        if done.returncode:
            reason = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            print(f"{name:12} cannot run: {reason[-1]}", flush=True)
            continue
        used, found[name] = json.loads(done.stdout)
        same = found[name] == found["portable"]
        print(f"{name:12} {used:14} {'the bits of plain C' if same else 'OTHER BITS'}", flush=True)
        if not same:
            sys.exit(f"{name} is wrong: no figures")
    return [name for name in found if name != "portable"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[usable_cores()])
    parser.add_argument(
        "--instructions", nargs="*", default=None, help="default: those of this CPU, as chosen at start"
    )
    parser.add_argument("--llama-cpp", metavar="PYTHON")
    parser.add_argument("--unchecked", action="store_true", help="measure without the comparison of bits")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of the process, not wall time")
    options = parser.parse_args()
    print(f"{cpu_name()}, {usable_cores()} usable cores", flush=True)
    if not options.unchecked:
        check_bits()
    clock = "process_time" if options.cpu_time else "perf_counter"
    for threads in options.threads:
        how = (str(threads), clock)
        contenders = [
            start(f"int8 {name}".strip(), sys.executable, PACELINE, options.model, "int8", *how, instructions=name)
            for name in (options.instructions or [""])
        ]
        contenders.append(start("float32", sys.executable, PACELINE, options.model, "float32", *how))
        if options.llama_cpp:
            path = str(find_model(options.model))
            contenders.append(start("llama.cpp", options.llama_cpp, LLAMA_CPP, path, "", *how))
        report(threads, contenders, options.repeats)
        for contender in contenders:
            contender.process.stdin.close()  # type: ignore[union-attr]  # a pipe
            contender.process.wait()


def report(threads: int, contenders: list[Contender], repeats: int) -> None:
    for _ in range(repeats):
        for rows in ROWS:
            for contender in contenders:  # in turns, so that load affects all
                contender.measure(rows, 64, rows)
    for _ in range(max(2, repeats // 5)):
        for rows in PROMPTS:
            for contender in contenders:
                contender.measure(rows, 0, 1)
    print(f"\n{threads} threads: ms of a pass over R rows behind 64 tokens (and times one row); prompts in tokens/s")
    print(
        f"| contender | {' | '.join(f'{rows} rows' for rows in ROWS)} | {' | '.join(f'prompt {n}' for n in PROMPTS)} |"
    )
    print("|---" * (1 + len(ROWS) + len(PROMPTS)) + "|")
    for contender in contenders:
        single = contender.best[1, 64]
        times = [f"{contender.best[rows, 64] * 1e3:.2f} ({contender.best[rows, 64] / single:.2f})" for rows in ROWS]
        prompts = [f"{rows / contender.best[rows, 0]:.0f}" for rows in PROMPTS]
        name = f"{contender.label}, {contender.instructions}" if contender.label != "llama.cpp" else contender.label
        print(f"| {name} | {' | '.join(times)} | {' | '.join(prompts)} |", flush=True)


if __name__ == "__main__":
    main()

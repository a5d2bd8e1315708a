"""Seconds from the start of a process until an engine is ready, by phase: the first time on a machine, and the second time.

    python benchmarks/gpu/start.py --base MODEL --draft MODEL
    python benchmarks/gpu/start.py --shape none --base FOLDER --cold

Both starts are fresh processes. The first has an empty folder of compiled kernels, the second finds what the first has left.
An inflated target (--shape) generates its weights; `read weights` then is the time of that, which a checkpoint would not take.
`--cold` drops the files of the models from the page cache before each start.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ONE = "PACELINE_START_BEGAN"
"""Environment variable of a measured process: the time when it was started."""


class Phases(logging.Handler):
    """Collects the lines of the timeline."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "paceline.core.machine":
            name, seconds, note = record.args
            self.rows.append((name, seconds, note.strip(" ()")))
            print(f"  {record.getMessage()}", file=sys.stderr, flush=True)
        elif record.levelno >= logging.WARNING:
            print(f"  {record.getMessage()}", file=sys.stderr, flush=True)


def start(options: argparse.Namespace) -> None:
    """Build and warm up an engine in this process; print the phases as JSON."""
    began = float(os.environ[ONE])
    phases = Phases()
    logging.getLogger("paceline").addHandler(phases)
    logging.getLogger("paceline").setLevel(logging.INFO)
    import torch

    from paceline.core.config import EngineConfig, SpeculationConfig
    from paceline.engine.start.build import build_engine

    phases.rows.append(("import", time.time() - began, ""))
    before = time.time()
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
    phases.rows.append(("open the device", time.time() - before, ""))
    engine = build_engine(
        EngineConfig(
            model=target(options),
            draft=options.draft or "none",
            max_num_seqs=options.sequences,
            max_batched_tokens=options.tokens,
            max_model_len=options.window,
            speculation=SpeculationConfig(max_depth=options.depth),
        )
    )
    before = time.time()
    engine.warm_up()
    phases.rows.append(("warm-up in all", time.time() - before, ""))
    phases.rows.append(("ready", time.time() - began, "after the start of the process"))
    before = time.time()
    while engine.hooks.has_idle_work:
        engine.hooks.use_idle_time()
    phases.rows.append(("idle work", time.time() - before, "after it was ready"))
    first_answer(engine, phases)
    engine.close()
    print(json.dumps(phases.rows))


def first_answer(engine, phases: Phases) -> None:
    from paceline.core.request import Request, SamplingParams

    before, first = time.time(), 0.0
    engine.add(
        engine.validate(Request("first", tuple(range(100, 200)), SamplingParams(max_tokens=16, temperature=0.0)))
    )
    while engine.has_work:
        if engine.step() and not first:
            first = time.time() - before
    phases.rows.append(("first token", first, "of the first request"))


def target(options: argparse.Namespace) -> str:
    if options.shape == "none":
        return options.base
    return f"inflate:{options.shape}?base={options.base}&noise={options.noise}"


def drop_page_cache(paths: list[Path]) -> None:
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(folder: str, options: argparse.Namespace) -> list[tuple[str, float, str]]:
    """The phases of a start in a fresh process, with this folder of compiled kernels."""
    if options.cold:
        drop_page_cache([Path(name) for name in (options.base, options.draft) if name])
    environment = {**os.environ, "TRITON_CACHE_DIR": folder, ONE: str(time.time())}
    run = subprocess.run([sys.executable, *sys.argv], env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode:
        sys.exit(f"the start failed with status {run.returncode}")
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b", help="llama-1b, llama-8b, llama-70b; none: the base model")
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--draft", help="a model or a trained draft; default: the base model with a shape, else none")
    parser.add_argument("--noise", type=float, default=0.06)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, help="max_batched_tokens; default: by device")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--cold", action="store_true", help="drop the models from the page cache first")
    options = parser.parse_args()
    if options.draft is None and options.shape != "none":
        options.draft = options.base
    if ONE in os.environ:
        start(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        for title in ("first start", "second start"):
            print(f"{title}: {target(options)}, {options.sequences} sequences", flush=True)
            for name, seconds, note in measure(folder, options):
                print(f"| {name:30} | {seconds:7.1f} | {note} |", flush=True)


if __name__ == "__main__":
    main()

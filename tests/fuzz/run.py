"""Runs the fuzz targets: `make fuzz`, or `python -m tests.fuzz.run --minutes 5 --target codec`.

Each target runs in a process of its own. New inputs are kept in build/fuzz/corpus, findings in build/fuzz/findings. Atheris
follows the branches that an input takes. It has packages for x86 only; elsewhere hypothesis changes the kept inputs.

`--examples` runs the kept corpus and so many changed inputs of each target, always the same ones, in one process.
"""

import argparse
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.target import CORPUS, MEGABYTES, MODULES, Checked, FuzzTarget, corpus, load, peak_megabytes

BUILD = Path("build/fuzz")
INSTALL = "pip install 'paceline[fuzz]'"
INSTRUMENTED = ["paceline", "uvicorn.protocols", "jinja2", "yaml"]
"""Packages whose branches lead atheris."""
WAIT_SECONDS = 120
"""Seconds after which libFuzzer ends an input that waits, on a busy machine."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="time of all targets together")
    parser.add_argument("--target", nargs="+", choices=MODULES, default=list(MODULES), metavar="NAME")
    parser.add_argument("--engine", choices=("atheris", "hypothesis"), help="default: atheris if it is installed")
    parser.add_argument("--examples", type=int, help="run the kept corpus and so many changed inputs, and end")
    parser.add_argument("--input", type=Path, help="run the target on this file alone")
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)  # of one target, in its own process
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    if args.input is not None:
        Checked(load(args.target[0]))(args.input.read_bytes())
        return
    if args.examples is not None:
        for name in args.target:
            print(json.dumps(replay(name, args.examples)), flush=True)
        return
    engine = args.engine or ("atheris" if find_spec("atheris") else "hypothesis")
    if engine == "atheris" and not find_spec("atheris"):
        sys.exit(f"atheris is not installed: {INSTALL}, or --engine hypothesis")
    if args.seconds is not None:
        (run_atheris if engine == "atheris" else run_hypothesis)(args.target[0], args.seconds)
        return
    if engine == "hypothesis":
        print(f"hypothesis, which does not follow branches; for atheris: {INSTALL}")
    sys.exit(run_all(args.target, args.minutes * 60 / len(args.target), engine))


def run_all(names: list[str], seconds: float, engine: str) -> int:
    """The number of targets with a finding."""
    print("| target | inputs | edges | corpus | seconds | findings |\n|---|---|---|---|---|---|")
    num_failed = 0
    for name in names:
        for folder in ("corpus", "findings"):
            (BUILD / folder / name).mkdir(parents=True, exist_ok=True)
        log, began = BUILD / f"{name}.log", time.monotonic()
        command = [sys.executable, "-m", "tests.fuzz.run", "--engine", engine, "--seconds", str(seconds), "--target"]
        with log.open("wb") as out:
            status = subprocess.run([*command, name], stdout=out, stderr=out, env=_environment()).returncode
        text = log.read_text("utf-8", "replace")
        print(f"| {name} | {_summary(text)} | {time.monotonic() - began:.0f} | {int(status != 0)} |", flush=True)
        if status:
            num_failed += 1
            print(f"{log}:\n{text[-4000:]}")
    return num_failed


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false"}


def _summary(log: str) -> str:
    """Inputs, edges and kept inputs, as far as the log has them."""
    inputs = re.findall(r"^(?:#|stat::number_of_executed_units: )(\d+)", log, re.MULTILINE)
    others = (re.findall(pattern, log) for pattern in (r"cov: (\d+)", r"corp: (\d+)"))
    return " | ".join([str(max(map(int, inputs), default=0)), *(found[-1] if found else "" for found in others)])


def run_atheris(name: str, seconds: float) -> None:
    import atheris

    # They are instrumented while the target and all that its seeds need are imported
    with atheris.instrument_imports(include=INSTRUMENTED):
        target = load(name)
        for seed in corpus(name).values():
            target.run(seed)
    checked, seeds = Checked(target), [*corpus(name).values()]

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        """Native code has no branches to follow: a third of the inputs are near a kept one."""
        rng = Random(seed)
        if rng.random() < 0.3:
            data = rng.choice(seeds)
        changed = target.mutate(data, rng) if rng.random() < 0.7 else atheris.Mutate(data, max_size)
        return changed[:max_size]

    options = {
        "max_total_time": int(seconds),
        "max_len": target.max_bytes,
        "timeout": WAIT_SECONDS,
        "rss_limit_mb": int(peak_megabytes() + 2 * MEGABYTES),
        "artifact_prefix": f"{BUILD}/findings/{name}/",
        "print_final_stats": 1,
        "verbosity": 1,
    }
    folders = [str(BUILD / "corpus" / name), str(CORPUS / name)]
    arguments = [sys.argv[0], *(f"-{key}={value}" for key, value in options.items()), *folders]
    atheris.Setup(arguments, checked, custom_mutator=mutate)
    atheris.Fuzz()


def run_hypothesis(name: str, seconds: float) -> None:
    """Runs changed inputs until the time is over. A finding is made as small as possible, and raised."""
    target = load(name)
    end, num_inputs = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        num_inputs += run_examples(target, [*corpus(name).values()], 500, BUILD / "findings" / name)
        print(f"#{num_inputs}", flush=True)


def replay(name: str, num_examples: int) -> dict[str, Any]:
    """What the kept corpus and `num_examples` changed inputs found."""
    target, inputs = load(name), corpus(name)
    checked = Checked(target)
    findings = []
    for file, data in inputs.items():
        try:
            if not checked(data) and file.startswith("seed"):
                findings.append(f"{file}: refused")
        except BaseException as error:
            findings.append(f"{file}: {type(error).__name__}: {error!s:.300}")
    try:
        run_examples(target, [*inputs.values()], num_examples)
    except BaseException as error:
        findings.append(f"{type(error).__name__}: {error!s:.300} {''.join(getattr(error, '__notes__', ()))[:2000]}")
    return {"target": name, "inputs": len(inputs) + num_examples, "findings": findings}


def run_examples(target: FuzzTarget, inputs: list[bytes], count: int, findings: Path | None = None) -> int:
    """Runs `count` inputs that hypothesis makes of `inputs`. Without `findings`, the folder of findings, they are always the
    same."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    checked = Checked(target)

    @settings(
        max_examples=count,
        derandomize=findings is None,
        database=None,
        deadline=None,
        phases=[Phase.generate] if findings is None else [Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(inputs), st.randoms(use_true_random=False))
    def run(data: bytes, rng: Random) -> None:
        changed = target.mutate(data, rng)[: target.max_bytes]
        try:
            checked(changed)
        except BaseException as error:
            if findings is not None:
                (findings / _name(changed)).write_bytes(changed)
            error.add_note(f"input: {changed!r:.1500}")
            raise

    run()
    return count


def _name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()

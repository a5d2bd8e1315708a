"""The engine's own audit under load: the share of steps that it takes, and the texts that it compares.

    python benchmarks/exactness/audit_load.py --streams 128 --seconds 120 --device cuda --draft auto
    python benchmarks/exactness/audit_load.py --plant          # a corrupt cache slot now and then: how soon is it found?

Streams send one request after another, so that the engine is never idle.
"""

import argparse
import itertools
import sys
import threading
import time
from typing import Any

import torch

from paceline import LLM, SamplingParams
from paceline.core.errors import EngineClosed
from paceline.core.sequence import BLOCK_SIZE
from paceline.engine import StepHook

TOPICS = ("rivers", "prime numbers", "bread", "sorting a list", "the moon", "tax law", "chess openings", "jazz")
EVERY = 3
"""Steps between two corrupt slots."""


class CorruptSlots(StepHook):
    """Changes the keys and values of the newest committed token of one sequence, every few steps."""

    def __init__(self) -> None:
        self.blocks: Any = None
        self.began: float | None = None
        self._runner: Any = None
        self._steps = 0

    def attach(self, engine: Any) -> None:
        self._runner = engine.runner

    @torch.inference_mode()
    def committed(self, result: Any) -> None:
        self._steps += 1
        running = [
            item.sequence for item in result.sequences if item.verdict is not None and not item.sequence.is_finished
        ]
        if self._steps % EVERY or not running or self.blocks is None:
            return
        sequence = running[self._steps // EVERY % len(running)]
        slot = sequence.num_computed - 1
        block = self.blocks(sequence.id)[slot // BLOCK_SIZE]
        for keys, values in self._runner.cache:
            keys[block, slot % BLOCK_SIZE] = 0
            values[block, slot % BLOCK_SIZE] = 0
        self.began = self.began or time.perf_counter()


def stream(llm: LLM, numbers: "itertools.count[int]", tokens: int, stop: threading.Event) -> None:
    while not stop.is_set():
        number = next(numbers)
        prompt = f"Write {5 + number} sentences about {TOPICS[number % len(TOPICS)]}."
        try:
            llm.generate(prompt, SamplingParams(temperature=0.8, seed=number, max_tokens=tokens, ignore_eos=True))
        except EngineClosed:
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--fraction", type=float, default=0.1, help="share of finished texts that the audit selects")
    parser.add_argument("--plant", action="store_true", help="corrupt cache slots, and stop when the audit finds one")
    options = parser.parse_args()
    fault, stop, numbers = CorruptSlots(), threading.Event(), itertools.count()
    with LLM(
        options.model,
        draft=options.draft,
        device=options.device,
        max_num_seqs=options.streams,
        audit_fraction=options.fraction,
        hooks=(fault,) if options.plant else (),
    ) as llm:
        llm.warm_up()
        fault.blocks = llm.engine.scheduler.tables.blocks
        threads = [
            threading.Thread(target=stream, args=(llm, numbers, options.tokens, stop)) for _ in range(options.streams)
        ]
        for thread in threads:
            thread.start()
        began = time.perf_counter()
        while time.perf_counter() - began < options.seconds:
            time.sleep(0.1)
            if options.plant and llm.snapshot().audit.drifted:
                break
        took, status = time.perf_counter() - began, llm.snapshot()
        stop.set()
    audit = status.audit
    share = audit.busy_passes / max(1, audit.busy_steps)
    print(
        f"{options.streams} streams, {took:.0f} s, {next(numbers)} requests, {status.generated} tokens: {audit.busy_passes} "
        f"passes of the audit in {audit.busy_steps} steps ({share:.2%}), {audit.texts} texts and {audit.audited} tokens "
        f"compared, {audit.dropped} texts dropped, {audit.drifted} differences"
    )
    for finding in audit.findings[:1]:
        since = 0.0 if fault.began is None else time.perf_counter() - fault.began
        print(f"first finding {since:.1f} s after the first fault: output token {finding.first}, {finding.where}")
    return 0 if bool(audit.drifted) == options.plant and share <= 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())

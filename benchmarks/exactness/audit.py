"""The audit on the embedded model: a correct engine, and injected bugs.

    python -m benchmarks.exactness.audit PROMPTS.jsonl > audit.txt

Run from the root of the repository. A line of the file has `prompt`, `question` or `turns`. The draft is the model
with noise on its weights, so that rounds accept and reject. Results are in benchmarks/exactness/README.md.
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from math import comb
from pathlib import Path
from typing import Any

import torch
from tests.exactness.test_embedded import Noisy
from tests.tools.audit.planted import COUPLED, REJECTION, stale_slot

from paceline.core.config import EngineConfig
from paceline.core.request import SamplingParams
from paceline.engine.start import build
from paceline.engine.start.llm import LLM
from paceline.models.decoder.forward import DecoderModel
from paceline.models.loading.load import LoadedModel, open_checkpoint
from paceline.tools.audit.auditor import Auditor, Workload
from paceline.tools.audit.report import Report

RULES: dict[str, dict[str, Callable[[Any], Any]]] = {
    "coupled": {**COUPLED, "a stale KV slot in one round of 20": lambda engine: stale_slot(engine, 20)},
    "rejection": {**REJECTION, "a stale KV slot in one round of 20": lambda engine: stale_slot(engine, 20)},
}
SUBSETS = (1, 5, 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--limit", type=int, default=200, help="prompts for the correct engine")
    parser.add_argument("--planted", type=int, default=40, help="prompts for each injected bug")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--rule", choices=RULES, help="only this rule")
    options = parser.parse_args()
    questions = read(options.prompts, options.limit)
    build.load_second = lambda name, config, target: noisy(target, options.noise)
    config = EngineConfig()
    speculation = {"depth": "fixed", "max_depth": 4, "breaker_rounds": 2**31}
    with LLM(config.model, draft="noise", speculation=speculation, max_model_len=1024, audit_fraction=0.0) as llm:
        for rule, bugs in RULES.items():
            if options.rule not in (None, rule):
                continue
            sampling = SamplingParams(max_tokens=options.tokens, temperature=options.temperature, seed=1)
            run(llm, "correct engine", nullcontext, Workload(questions, sampling, rule))
            for name, bug in bugs.items():
                run(llm, name, bug, Workload(questions[: options.planted], sampling, rule))


def run(llm: LLM, name: str, bug: Callable[[Any], Any], workload: Workload) -> None:
    started = time.monotonic()
    with bug(llm.engine):
        report = Report({}, Auditor(llm).run(workload), workload.is_coupled)
    num_found = sum(bool(text.findings) for text in report.texts)
    print(
        f"{workload.verification}: {name}: {'clean' if report.is_clean else 'DRIFT'}; {len(report.texts)} prompts, "
        f"{report.num_accepted} of {report.num_drafted} drafts accepted, {time.monotonic() - started:.0f} s"
    )
    for check in report.checks:
        print(f"    {check.name}: {check.num_wrong} of {check.num_checked} {check.unit}; {check.detail}")
    if num_found:
        chances = ", ".join(f"{count}: {probability(num_found, len(report.texts), count):.4f}" for count in SUBSETS)
        print(f"    found in {num_found} of {len(report.texts)} texts; probability to find it by prompts: {chances}")
    else:
        for line in report.power:
            print(f"    {line}")
    print(flush=True)


def probability(num_found: int, texts: int, count: int) -> float:
    """The probability that `count` texts, drawn at random, contain one with a finding."""
    return 1.0 - comb(texts - num_found, count) / comb(texts, count) if count <= texts else float("nan")


def read(path: Path, limit: int) -> list[list[dict[str, str]]]:
    questions = []
    for line in path.read_text("utf-8").splitlines()[:limit]:
        entry = json.loads(line)
        text = entry.get("prompt") or entry.get("question") or entry["turns"][0]
        questions.append([{"role": "user", "content": text}])
    return questions


def noisy(target: LoadedModel, noise: float) -> LoadedModel:
    checkpoint = open_checkpoint(EngineConfig().model)
    model = DecoderModel(checkpoint.config, Noisy(checkpoint.weights, noise), torch.device("cpu"), torch.float32)
    return LoadedModel("noise", checkpoint.config, model, target.tokenizer)


if __name__ == "__main__":
    main()

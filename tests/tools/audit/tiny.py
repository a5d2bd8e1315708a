"""A tiny target with a similar draft, and a workload."""

import random
from pathlib import Path
from typing import Any

from paceline.core.request import SamplingParams
from paceline.engine.start.llm import LLM
from paceline.tools.audit.auditor import Auditor, Workload
from paceline.tools.audit.report import Report
from tests.engine.start.test_build import LETTERS, save_checkpoint


def tiny_llm(folder: Path, **options: Any) -> LLM:
    target, draft = save_checkpoint(folder / "target"), save_checkpoint(folder / "draft", perturb=0.15)
    speculation = {"depth": "fixed", "max_depth": 4, "breaker_rounds": 10**6}
    options = {"kv_tokens": 2048, "max_model_len": 128, "device": "cpu", "audit_fraction": 0.0, **options}
    return LLM(target, draft=draft, speculation=speculation, **options)


def workload(count: int = 12, verification: Any = "coupled", method: str | None = None, **sampling: Any) -> Workload:
    rng = random.Random(0)
    shared = "".join(rng.choices(LETTERS, k=20))  # some prompts share a prefix
    prompts = [shared[: 20 * (i % 2)] + "".join(rng.choices(LETTERS, k=rng.randint(1, 30))) for i in range(count)]
    return Workload(
        prompts, SamplingParams(**{"max_tokens": 16, "seed": 7, "ignore_eos": True, **sampling}), verification, method
    )


def audited(llm: LLM, load: Workload) -> Report:
    return Report({"model": "tiny"}, Auditor(llm).run(load), load.is_coupled)

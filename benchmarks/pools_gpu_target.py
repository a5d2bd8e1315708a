"""For pools_gpu.py: the configuration of the target, its prompts, and passes slowed to those of a GPU."""

import argparse
import time

from paceline.bench.presets import DEFAULT_PROMPTS
from paceline.bench.prompts import load_prompts, select
from paceline.core.config import EngineConfig, SpeculationConfig
from paceline.engine.engine import Engine
from paceline.engine.hooks.hook import StepHook
from paceline.engine.schedule import Schedule
from paceline.models.tokenizer.chat_template import ChatTemplate


class PacedPasses(StepHook):
    """Makes passes of the target take a time in which this process computes nothing, as with a GPU."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._began = seconds, 0.0

    def before_pass(self, schedule: Schedule) -> None:
        self._began = time.perf_counter()

    def after_pass(self, schedule: Schedule, drafts: object, output: object) -> None:
        time.sleep(max(0.0, self._began + self._seconds - time.perf_counter()))


def target_config(options: argparse.Namespace) -> EngineConfig:
    inflated = f"inflate:{options.shape}?base={options.base}&noise={options.noise}"
    return EngineConfig(
        model=options.base if options.shape == "none" else inflated,
        draft=options.base,
        device=options.device,
        quantization=options.quantization,
        max_num_seqs=max(options.streams),
        max_batched_tokens=1024,
        max_model_len=2048,
        kv_tokens=cache_tokens(options),
        prefix_caching=False,
        audit_fraction=0.0,
        speculation=SpeculationConfig(depth="goodput", max_depth=options.max_depth),
    )


def cache_tokens(options: argparse.Namespace) -> int:
    """Tokens of a cache for all streams at once."""
    return max(4096, max(options.streams) * (options.longest + options.tokens + 64))


def encoded_prompts(engine: Engine, options: argparse.Namespace) -> list[list[int]]:
    known = load_prompts(options.prompts) if options.prompts else list(DEFAULT_PROMPTS)
    assert engine.tokenizer is not None
    tokenizer, template = engine.tokenizer, ChatTemplate.of(engine.tokenizer)
    ids = [
        list(tokenizer.encode(template.render([{"role": "user", "content": prompt.turns[0]}])))
        for prompt in select(known, limit=4 * max(options.count, *options.streams))
    ]
    prompts = [prompt for prompt in ids if len(prompt) <= options.longest]
    if not prompts:
        raise SystemExit(f"no prompt has {options.longest} tokens or fewer: raise --longest")
    return prompts

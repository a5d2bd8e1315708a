"""For pools_gpu.py: the target with its drafts, and the measurement of one contender."""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import torch
from pools_gpu_draft import DraftProcess, log
from pools_gpu_report import Report, Row

from paceline.bench.presets import DEFAULT_PROMPTS
from paceline.bench.prompts import load_prompts, select
from paceline.core.config import EngineConfig, SpeculationConfig
from paceline.core.machine import freeze_loaded_objects
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.core.speculation import SpeculationParams
from paceline.engine.build import build_engine
from paceline.engine.engine import Engine
from paceline.engine.executors.executor import StepResult
from paceline.engine.hooks.hook import StepHook
from paceline.engine.schedule import Schedule
from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.drafts.compatibility import fingerprint
from paceline.models.loading.load import open_checkpoint
from paceline.models.runner import Span
from paceline.models.tokenizer.chat_template import ChatTemplate
from paceline.runtime.draft_pool.connection import DraftAddress, DraftCounters
from paceline.runtime.draft_pool.proposer import PoolProposer, PoolStatus
from paceline.speculation.default_method import DefaultMethod
from paceline.speculation.depth.simple_rules import FixedDepth


class VerifyTimes(StepHook):
    """Seconds of the verifications of steps in which all sequences decode."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def committed(self, result: StepResult) -> None:
        if all(sequence.verdict is not None and sequence.num_tokens == 1 for sequence in result.sequences):
            self.seconds.append(result.verify_seconds)


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


SKIPPED = 8
"""Untimed tokens at the start of a text: prefill, first draft, first graph step."""
WARM_TOKENS = 24
MAX_GROUPS = 8
"""Untimed batches of `chosen`, if the contenders before it did not measure both methods enough."""


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    method: str | None = None
    depth: int | None = None
    """None: as `goodput` decides."""
    process: DraftProcess | None = None
    is_chosen: bool = False
    """The engine chooses the method; `method` is that of the draft worker."""


class Bench:
    """The target with its drafts."""

    def __init__(self, options: argparse.Namespace, report: Report) -> None:
        self.options, self.report = options, report
        self._verified = VerifyTimes()
        draft = open_checkpoint(options.base)
        tokenizer, size = fingerprint(draft.read_tokenizer()), draft.config.vocab_size
        self.pools = {
            "pool": PoolProposer((), tokenizer, size, "target-0"),
            "pool_trees": PoolProposer((), tokenizer, size, "target-0", verifies_trees=True),
        }
        hooks = [self._verified, *([PacedPasses(1e-3 * options.pace)] if options.pace else [])]
        self.engine = build_engine(target_config(options), hooks=hooks, extra_proposers=self.pools)
        self.engine.warm_up()
        self.engine.hooks.finish_idle_work()  # otherwise graphs are captured while goodput is measured
        self._goodput, self._fixed = self.engine.speculator.depth, FixedDepth(options.max_depth)
        assert self.engine.assignment is not None
        self._learned = self.engine.assignment.default
        """What `chosen` knows of both methods: steps of contenders with the same rule for the depth."""
        self._warmed: set[tuple[str, int]] = set()
        self.prompts = encoded_prompts(self.engine, options)
        freeze_loaded_objects()

    def measure(self, contender: Contender, streams: int, repeat: int) -> None:
        """Add one repeat to the row of the contender."""
        row = self.report.row(contender.name, streams) or Row(contender.name, streams, contender.depth)
        self._set_depth_rule(contender)
        if (process := contender.process) is None:
            began = self._run(contender, None, streams, row)
        else:
            assert contender.method is not None
            pool = self.pools[contender.method]
            with _joined(pool, process):
                began = self._run(contender, pool, streams, row)
            passes = [one for one in process.figures().passes if one.began > began]
            row.pass_ms = 1e3 * median(one.ended - one.began for one in passes) if passes else None
        row.gpu_bytes = self._gpu_bytes(contender)
        if contender.is_chosen:
            self._note_choice(contender, streams)
        if repeat == 0:
            self.report.rows.append(row)
            self._compare(row)
        log(self.report.line(row))

    def _set_depth_rule(self, contender: Contender) -> None:
        assert self.engine.assignment is not None
        if contender.depth is None:
            self.engine.speculator.depth, self.engine.assignment.default = self._goodput, self._learned
        else:
            self.engine.speculator.depth = self._fixed
            self.engine.assignment.default = DefaultMethod(self._learned.methods)

    def _note_choice(self, contender: Contender, streams: int) -> None:
        """Note the method that the engine chose, and the rates by which it did."""
        rates = [(one, self._learned.goodput(one, streams) or 0.0) for one in self._learned.methods]
        shown = ", ".join(f"{one} {rate:.1f}" for one, rate in rates)
        self.report.notes.append(
            f"{contender.name}, {streams} streams: {self._learned.method}; tokens/s of a sequence: {shown}"
        )

    def _run(self, contender: Contender, pool: PoolProposer | None, streams: int, row: Row) -> float:
        """Warm up, then decode the prompts in groups of `streams`; returns when the timed part began."""
        options, count = self.options, max(streams, self.options.count)
        chosen = [self.prompts[i % len(self.prompts)] for i in range(count // streams * streams)]
        groups = [chosen[i : i + streams] for i in range(0, len(chosen), streams)]
        is_first = (contender.name, streams) not in self._warmed
        self._warmed.add((contender.name, streams))
        self._decode(groups[0], WARM_TOKENS if is_first else SKIPPED, contender, Row("warm", streams))
        if contender.is_chosen:
            self._measure_methods(groups[0], contender, streams)
        self._verified.seconds.clear()
        before = pool and (pool.status(), replace(pool.connections[0].counters))
        tokens, seconds, began = row.tokens, row.seconds, time.perf_counter()
        texts: list[list[int]] = []
        for group in groups:
            texts += self._decode(group, options.tokens, contender, row)
        row.texts = row.texts or texts
        row.rates.append((row.tokens - tokens) / max(1e-9, row.seconds - seconds))
        row.verify_ms += [1e3 * seconds for seconds in self._verified.seconds]
        if pool is not None and before is not None:
            self._add_pool_counters(row, pool, *before)
        return began

    def _add_pool_counters(self, row: Row, pool: PoolProposer, then: PoolStatus, counters: DraftCounters) -> None:
        """Add what the pool counted since `then`, and its connection since `counters`."""
        after, now = pool.status(), pool.connections[0].counters
        row.wait_seconds = (row.wait_seconds or 0.0) + after.wait_seconds - then.wait_seconds
        row.pool_steps += after.steps - then.steps
        row.ready += now.ready - counters.ready
        row.requested += now.rounds - counters.rounds
        row.undrafted += after.undrafted - then.undrafted
        if now.losses or now.faults:
            self.report.notes.append(f"{row.name}, {row.streams} streams: {now}")

    def _decode(self, prompts: list[list[int]], tokens: int, contender: Contender, row: Row) -> list[list[int]]:
        """The texts of one batch. It is timed from when all sequences decode until the first one ends."""
        engine, texts = self.engine, {f"r{i}": list[int]() for i in range(len(prompts))}
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        method = None if contender.is_chosen else contender.method
        speculation = SpeculationParams(contender.method is not None, method, contender.depth)
        try:
            for name, prompt in zip(texts, prompts, strict=True):
                engine.add(Request(name, tuple(prompt), sampling, speculation))
            started, is_over = 0.0, False
            while engine.has_work and not is_over:
                outputs = engine.step()
                now = time.perf_counter()
                for output in outputs:
                    texts[output.request_id].extend(output.tokens)
                    is_over |= output.finish_reason is not None
                if started and outputs:
                    row.seconds += now - started
                    row.tokens += sum(len(output.tokens) for output in outputs)
                    row.steps, row.rounds = row.steps + 1, row.rounds + len(outputs)
                    row.drafted += sum(output.drafted for output in outputs)
                    row.accepted += sum(output.accepted for output in outputs)
                if outputs and min(map(len, texts.values())) >= SKIPPED:
                    started = now
        finally:
            for name in texts:
                engine.cancel(name)
            engine.step()  # ends a graph step in flight
        return list(texts.values())

    def _measure_methods(self, group: list[list[int]], contender: Contender, streams: int) -> None:
        """Decode untimed until the engine has measured both methods at this load, as a server that has run for a while."""
        for _ in range(MAX_GROUPS):
            if all(self._learned.goodput(method, streams) is not None for method in self._learned.methods):
                break
            self._decode(group, self.options.tokens, contender, Row("warm", streams))

    def _compare(self, row: Row) -> None:
        """Count the texts that equal those of plain decoding, as far as both go."""
        plain = self.report.plain(row.streams)
        for i, (ours, theirs) in enumerate(zip(row.texts, plain.texts if plain else row.texts, strict=True)):
            length = min(len(ours), len(theirs))
            row.same += ours[:length] == theirs[:length]
            if ours[:length] != theirs[:length]:
                prompt = self.prompts[i % len(self.prompts)]
                row.gap = max(row.gap, *(largest_gap(self.engine, prompt, text) for text in (ours, theirs)))

    def _gpu_bytes(self, contender: Contender) -> int | None:
        """GPU memory that the draft takes: weights and cache in the engine, all tensors of another process."""
        if contender.process is not None and not contender.is_chosen:
            return contender.process.figures().gpu_bytes
        if not (contender.is_chosen or contender.method == "draft_model") or self.engine.runner.device.type != "cuda":
            return 0 if contender.method is None else None
        (runner,) = self.engine.speculator.proposers["draft_model"].traits.runners
        cache = sum(values.nbytes for layer in runner.cache for values in layer)  # type: ignore[attr-defined]
        return runner.model.weight_bytes + cache  # type: ignore[attr-defined,no-any-return]


def largest_gap(engine: Engine, prompt: list[int], text: list[int]) -> float:
    """The largest distance of any token's logit from the arg-max, rescored in one pass over the idle engine's KV cache."""
    ids = prompt + text[:-1]
    logits = engine.runner.forward([Span(range(-(-len(ids) // BLOCK_SIZE)), 0, ids, len(text))]).logits
    chosen = logits.gather(1, torch.tensor(text, device=logits.device).unsqueeze(1)).squeeze(1)
    return float((logits.amax(1) - chosen).max())


@contextmanager
def _joined(pool: PoolProposer, process: DraftProcess) -> Iterator[None]:
    pool.set_workers([DraftAddress(process.settings.name, process.address)])
    try:
        until = time.perf_counter() + 10.0
        while not pool.connections[0].is_ready:
            if time.perf_counter() > until:
                raise TimeoutError(f"the draft worker {process.settings.name} does not respond")
            pool.maintain()
            time.sleep(0.002)
        yield
    finally:
        pool.set_workers(())

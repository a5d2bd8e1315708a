"""One contender of vllm_plugin.py: an engine in a process of its own, which answers runs on standard input."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ENGINES = (
    "plain", "plain_sync", "ngram", "suffix", "combined", "pool", "pool_gpu", "draft_model", "paceline", "paceline_head",
)  # fmt: skip
"""Processes. The contender `paceline_plain` is a run of `paceline` without speculation."""
LOCAL = ("ngram", "suffix", "combined")
"""Methods of the plugin without a pool."""
POOLS = {"pool": "cpu", "pool_gpu": "cuda"}
"""Device of the draft worker of each contender with a pool."""
SMALL = 64
"""Largest size of contenders that `--large` does not name."""
DRAFT_MODEL_KV = 1.3
"""Factor on the KV cache of `draft_model`, which also holds that of the draft."""


class Engine(NamedTuple):
    run: Callable[[dict[str, Any]], dict[str, Any]]
    """A request of `vllm_plugin.py` -> seconds and tokens."""
    counters: Callable[[], dict[str, int]]
    """Counts since the start."""
    settle: Callable[[], None]
    """Do what waits for an idle moment, which would disturb the run of another contender."""


def serve(name: str, options: argparse.Namespace) -> None:
    """Answer runs until standard input ends. Logs go to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = (paceline_engine if name.startswith("paceline") else vllm_engine)(name, options)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        before = engine.counters()
        answer = engine.run(request)
        counted = {key: value - before.get(key, 0) for key, value in engine.counters().items()}
        engine.settle()
        print(json.dumps({**answer, "counted": counted}), file=answers, flush=True)


def sizes_of(name: str, options: argparse.Namespace) -> list[int]:
    """Batch sizes that a contender runs."""
    is_large = name.removesuffix("_plain") in options.large.split(",")
    return [size for size in map(int, options.sizes.split(",")) if is_large or size <= SMALL]


def kv_gib(name: str, options: argparse.Namespace) -> float:
    """KV cache of the target in a process."""
    given: float = options.large_kv_gib if max(sizes_of(name, options)) > SMALL else options.kv_gib
    return given * DRAFT_MODEL_KV if name == "draft_model" else given


def worker_address(name: str, options: argparse.Namespace) -> str:
    """Address of the draft worker of a contender with a pool."""
    return f"ipc://{(options.logs / name).resolve()}.socket"


def vllm_engine(name: str, options: argparse.Namespace) -> Engine:
    os.environ.update(
        VLLM_NO_USAGE_STATS="1",
        VLLM_USE_FLASHINFER_SAMPLER="0",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="INFO",
        VLLM_CACHE_ROOT=str((options.cache / name).resolve()),  # processes that start together share none
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        HF_HUB_OFFLINE="1",
    )
    if name not in ("plain", "draft_model"):
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        os.environ["PACELINE_COUPLED_SAMPLING"] = "1"  # greedy batches are decoded as without it
    from paceline.vllm.plugin import register
    from vllm import LLM, SamplingParams

    register()
    llm = LLM(
        model=options.model,
        dtype=options.dtype,
        max_num_seqs=max(sizes_of(name, options)),
        max_model_len=options.max_model_len,
        enable_prefix_caching=options.turn_tokens > 0,
        kv_cache_memory_bytes=int(kv_gib(name, options) * 2**30),  # not measured: others start meanwhile
        **(
            {"enforce_eager": True, "max_num_batched_tokens": 512}
            if options.device == "cpu"
            else {"gpu_memory_utilization": 0.05, "max_num_batched_tokens": 8192}  # as `vllm serve`; less memory
        ),
        **vllm_arguments(name, options),
    )

    cached = {"cached": 0} if options.turn_tokens else {}
    has_plugin = name in LOCAL or name in POOLS
    if has_plugin:
        drafter = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter
        propose, plugin_seconds = drafter.propose, [0.0]

        def timed(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            drafts = propose(*args, **options)
            plugin_seconds[0] += time.perf_counter() - started
            return drafts

        drafter.propose = timed

    def run(request: dict[str, Any]) -> dict[str, Any]:
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        params = SamplingParams(temperature=0.0, max_tokens=request["tokens"], ignore_eos=True)
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        for output in outputs if cached else ():
            cached["cached"] += output.num_cached_tokens or 0
        texts = [output.outputs[0] for output in outputs]
        return {"seconds": seconds, "tokens": [list(text.token_ids) for text in texts]}

    def counters() -> dict[str, int]:
        if not has_plugin:
            return dict(cached)
        loop = drafter.loop
        counted = {"steps": loop.num_steps, "plugin_us": round(1e6 * plugin_seconds[0])}
        counted |= {"drafted": loop.num_drafted, "accepted": loop.num_accepted}
        if name in POOLS:
            counted["pool_rounds"] = sum(connection.counters.rounds for connection in drafter.pool.connections)
        return counted | cached

    return Engine(run, counters, lambda: None)


def vllm_arguments(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of vLLM's LLM in which a contender differs from the others."""
    plugin = {"method": "custom_class", "num_speculative_tokens": options.depth}
    if name == "plain_sync":
        return {"async_scheduling": False}
    if name in LOCAL:
        return {
            "speculative_config": {**plugin, "model": "paceline.vllm.LocalProposer"},
            "additional_config": {"paceline": {"method": name}},
        }
    if name in POOLS:
        return {
            "speculative_config": {**plugin, "model": "paceline.vllm.PoolProposer"},
            "additional_config": {"paceline": {"workers": [worker_address(name, options)]}},
        }
    if name == "draft_model":
        return {
            "speculative_config": {
                "method": "draft_model",
                "model": options.draft,
                "num_speculative_tokens": options.depth,
            }
        }
    return {}


def paceline_engine(name: str, options: argparse.Namespace) -> Engine:
    from paceline.core.machine import freeze_loaded_objects
    from paceline.core.request import SamplingParams
    from paceline.engine.start.llm import LLM

    model, draft = (options.head_model, options.head) if name == "paceline_head" else (options.model, options.draft)
    llm = LLM(
        model,
        draft=draft,
        device=options.device,
        dtype=options.dtype,
        max_num_seqs=max(sizes_of(name, options)),
        max_model_len=options.max_model_len,
        kv_tokens=int(kv_gib(name, options) * 2**30) // kv_token_bytes(options),
        prefix_caching=options.turn_tokens > 0,
        audit_fraction=0.0,  # it would compute while others are measured
    )

    def settle() -> None:
        llm.finish_idle_work()

    llm.warm_up()
    settle()
    freeze_loaded_objects()  # as a server does, and vLLM
    total = {"steps": 0, "drafted": 0, "accepted": 0} | ({"cached": 0} if options.turn_tokens else {})
    if options.log_decisions:
        log_decisions(llm.engine.speculator.depth)

    def run(request: dict[str, Any]) -> dict[str, Any]:
        params = SamplingParams(max_tokens=request["tokens"], temperature=0.0, ignore_eos=True)
        choices = {"speculation": {"enabled": request["speculate"]}, "cache_salt": request["cache_salt"]}
        started = time.perf_counter()
        outputs = llm.generate(request["prompts"], params, **choices)
        seconds = time.perf_counter() - started
        if options.turn_tokens:
            total["cached"] += sum(output.num_cached_tokens for output in outputs)
        for done in (output.completions[0].speculation for output in outputs):
            total["steps"] += done.num_spec_steps
            total["drafted"] += done.num_draft_tokens
            total["accepted"] += done.num_accepted_draft_tokens
        return {"seconds": seconds, "tokens": [list(output.completions[0].token_ids) for output in outputs]}

    return Engine(run, lambda: dict(total), settle)


def log_decisions(policy: Any) -> None:
    """Write what the depth policy `goodput` expects at each decision about drafts, and what each step took, to the log."""
    drafts, observe = policy._drafts, policy.observe
    find = drafts.find
    print(
        json.dumps({"prefill_us": {name: 1e6 * curve for name, curve in drafts._prefill._calibrated.items()}}),
        file=sys.stderr,
    )

    def logged(batch: Any, shape: Any) -> Any:
        depths = find(batch, shape)
        seen = {
            "batch": len(batch),
            "advantage": drafts.advantage,
            "depth": max(depths or [0]),
            "waits": drafts.is_waiting,
        }
        seen["switch_ms"] = 1e3 * drafts._switch_on.seconds(len(batch))
        seen["prefill_ms"] = 1e3 * sum(drafts._prefill.seconds(candidate) for candidate in batch)
        seen["alphas"] = [round(alpha, 3) for alpha in policy.alphas(batch[0].traffic)[:4]] if batch else []
        print(json.dumps(seen), file=sys.stderr)
        return depths

    def observed(step: Any) -> None:
        seen = {"step": [step.batch, step.rows, step.prefill_rows, step.is_timed, round(1e3 * step.verify_seconds, 2)]}
        seen["drafting"] = [
            [drafting.depth, round(1e3 * drafting.seconds, 2), drafting.prefill_tokens] for drafting in step.drafting
        ]
        print(json.dumps(seen), file=sys.stderr)
        observe(step)

    drafts.find, policy.observe = logged, observed


def kv_token_bytes(options: argparse.Namespace) -> int:
    """Bytes of one token in the target's KV cache."""
    from paceline.models.families.read import read_config

    shape = read_config(json.loads((Path(options.model) / "config.json").read_text("utf-8")))
    return shape.kv_bytes_per_token(4 if options.dtype == "float32" else 2)

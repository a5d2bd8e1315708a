"""Runs vLLM once, in its own environment: `python generate.py JOB.json RESULT.json`.

A job has `llm` (arguments of vLLM's LLM), `coupled` (whether to sample with our noise), and `requests`: token ids of the
prompt and arguments of SamplingParams. The result has the tokens of each request, and the counters of our proposer.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text("utf-8"))
    os.environ["PACELINE_COUPLED_SAMPLING"] = "1" if job.get("coupled") else "0"
    from paceline.vllm.plugin import register
    from vllm import LLM, SamplingParams

    register()  # a source tree that is not installed has no entry point
    llm = LLM(max_num_seqs=16, enforce_eager=True, enable_prefix_caching=False, disable_log_stats=False, **job["llm"])
    prompts = [{"prompt_token_ids": request["ids"]} for request in job["requests"]]
    params = [SamplingParams(**request["sampling"]) for request in job["requests"]]
    llm.generate(prompts[:1], SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)
    before = counters(llm)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    result = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "seconds": time.perf_counter() - started,
        "metrics": {name: value - before.get(name, 0) for name, value in counters(llm).items()},
    }
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    loop = getattr(getattr(runner, "drafter", None), "loop", None)
    if loop is not None:
        result["loop"] = {"steps": loop.num_steps, "drafted": loop.num_drafted, "accepted": loop.num_accepted}
    pool = getattr(getattr(runner, "drafter", None), "pool", None)
    if pool is not None:
        result["pool_rounds"] = sum(connection.counters.rounds for connection in pool.connections)
    Path(result_file).write_text(json.dumps(result), "utf-8")


def counters(llm: Any) -> dict[str, int]:
    """Drafts that vLLM has counted so far."""
    return {
        one.name: one.value
        for one in llm.get_metrics()
        if one.name.startswith("vllm:spec_decode_num") and hasattr(one, "value")
    }


if __name__ == "__main__":
    main(*sys.argv[1:])

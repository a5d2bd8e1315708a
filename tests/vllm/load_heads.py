"""Loads EAGLE heads one after the other in one process of vLLM: `python load_heads.py JOB.json RESULT.json`.

A job has `prompts` (token ids), `max_tokens`, `depth`, and `heads`: name, folder of the target, and folder of the head or None.
The result has for each name the greedy tokens and the draft tokens of each prompt and the number of accepted ones, or the
error with which vLLM stops.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any


def main(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text("utf-8"))
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    results: dict[str, Any] = {}
    for head in job["heads"]:
        try:
            results[head["name"]] = generate(job, head["target"], head["folder"])
        except Exception as error:  # the test asserts which head stops with which message
            results[head["name"]] = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
        cleanup_dist_env_and_memory()
    Path(result_file).write_text(json.dumps(results), "utf-8")


def generate(job: dict[str, Any], target: str, head: str | None) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    drafts = {"method": "eagle3", "model": head, "num_speculative_tokens": job["depth"]}
    llm = LLM(
        model=target,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=16,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        async_scheduling=False,  # so that the scheduler takes the drafts of every step from the runner
        speculative_config=drafts if head else None,
    )
    drafted = record_drafts(llm)
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
    accepted = {one.name: one.value for one in llm.get_metrics() if hasattr(one, "value")}
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "drafted": [drafted.get(output.request_id.partition("-")[0], []) for output in outputs],
        "accepted": accepted.get("vllm:spec_decode_num_accepted_tokens", 0),
    }


def record_drafts(llm: Any) -> dict[str, list[int]]:
    """Draft tokens by request, filled while vLLM generates."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    take = runner.take_draft_token_ids
    drafted: dict[str, list[int]] = {}

    def take_and_record() -> Any:
        taken = take()
        if taken is not None:
            for request, tokens in zip(taken.req_ids, taken.draft_token_ids, strict=True):
                drafted.setdefault(request.partition("-")[0], []).extend(tokens)
        return taken

    runner.take_draft_token_ids = take_and_record
    return drafted


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The embedded model on this CPU: ours against `transformers.generate`, speculation on against off, in one run.

    python benchmarks/cpu.py [--tokens 128] [--repeats 3] [--skip-transformers] [--llama-cpp PYTHON]

Every engine generates the same number of tokens, greedily, from the same prompts, end of text ignored; prompts are included
in the time. `--llama-cpp` names a Python that has `llama-cpp-python`, to run it beside us on the same GGUF.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from paceline import LLM, SamplingParams
from paceline.models.hub import find_model

LLAMA_CPP = """
import json, sys, time
from llama_cpp import Llama
job = json.load(sys.stdin)
llm = Llama(job["model"], n_ctx=2048, n_threads=job["threads"], verbose=False)
def run(ids):
    llm.reset()
    out = []
    for token in llm.generate(ids, top_k=1, temp=0.0):
        out.append(token)
        if len(out) == job["tokens"]:
            return
run(job["prompts"][0])
times = []
for ids in job["prompts"]:
    started = time.perf_counter()
    run(ids)
    times.append(time.perf_counter() - started)
print(json.dumps(times))
"""


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=Path("../shared/data/spec_bench_dev.jsonl"))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--llama-cpp", metavar="PYTHON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")

    rows = [json.loads(line) for line in options.prompts.read_text().splitlines()]
    chats = [[{"role": "user", "content": row["turns"][0]}] for row in rows if len(row["turns"][0]) < 1200][::25][:8]
    sampling = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    llm = LLM("smollm2", prefix_caching=False, max_num_seqs=8)
    prompts = [llm._encode(chat) for chat in chats]
    print(
        f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, {options.tokens} new each"
    )
    on, off = {"speculation": {"enabled": True}}, {"speculation": {"enabled": False}}

    def ours(count: int, how: dict[str, object]) -> Callable[[], object]:
        requests = [llm._request(ids, sampling, **how) for ids in prompts[:count]]

        def work() -> object:
            fresh = [llm._request(r.prompt_ids, sampling, **how) for r in requests]
            return llm._wait(fresh)

        return work

    table: list[tuple[str, int, float]] = []
    ratios: dict[int, list[float]] = {1: [], 8: []}
    for count in (1, 8):
        ours(count, off)()
        pairs = [
            (median_seconds(ours(count, off), 1), median_seconds(ours(count, on), 1)) for _ in range(options.repeats)
        ]
        plain = statistics.median(a for a, _ in pairs)
        table.append(("paceline, plain", count, count * options.tokens / plain))
        table.append(
            ("paceline, speculation on", count, count * options.tokens / statistics.median(b for _, b in pairs))
        )
        ratios[count] = [a / b for a, b in pairs]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    llm.close()

    if not options.skip_transformers:
        from transformers import AutoModelForCausalLM

        path = find_model("smollm2")
        reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
        for count in (1, 8):
            width = max(len(ids) for ids in prompts[:count])
            padded = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in prompts[:count]])
            mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts[:count]])

            def theirs(padded: torch.Tensor = padded, mask: torch.Tensor = mask) -> object:
                with torch.inference_mode():
                    return reference.generate(
                        padded,
                        attention_mask=mask,
                        max_new_tokens=options.tokens,
                        min_new_tokens=options.tokens,
                        do_sample=False,
                        pad_token_id=0,
                    )

            seconds = median_seconds(theirs, max(1, options.repeats - 1))
            table.append(("transformers.generate, float32", count, count * options.tokens / seconds))
    if options.llama_cpp:
        job = {
            "model": str(find_model("smollm2")),
            "threads": os.cpu_count(),
            "tokens": options.tokens,
            "prompts": prompts[:1] * 3,
        }
        answer = subprocess.run(
            [options.llama_cpp, "-c", LLAMA_CPP], input=json.dumps(job), capture_output=True, text=True, check=True
        )
        table.append(("llama.cpp, Q4_1 as stored", 1, options.tokens / statistics.median(json.loads(answer.stdout))))

    base = {count: rate for name, count, rate in table if name == "paceline, plain"}
    print(f"{'engine':34} {'batch':>5} {'tokens/s':>9} {'of ours, plain':>15}")
    for name, count, rate in table:
        print(f"{name:34} {count:5} {rate:9.1f} {rate / base[count]:15.2f}")
    for count, values in ratios.items():
        print(f"speculation on / off, batch {count}: " + " ".join(f"{value:.2f}" for value in values))
    print(f"resident memory with 8 streams, at the most: {memory:.2f} GB")


if __name__ == "__main__":
    sys.exit(main())

"""The embedded model on this CPU: Paceline, transformers, llama.cpp and vLLM, each in its own process.

    python benchmarks/cpu/cpu.py --prompts spec_bench_dev.jsonl [--tokens 128] [--repeats 5] [--draft smollm2-eagle] [--sampled]
        [--llama-cpp PYTHON] [--vllm PYTHON]

Every engine generates the same number of greedy tokens from the same prompts of spec_bench_dev.jsonl. The time
includes prefill. `--sampled`: Paceline alone, with the sampling that the model recommends and a seed. `--llama-cpp` is the
path of a Python with `llama-cpp-python`, which loads the same GGUF, `--vllm` of one with vLLM's CPU build, for example of
`make test-vllm`: it loads the same weights in float32.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.core.machine import cpu_name, usable_cores
from paceline.model_files.hub.hub import find_model
from paceline.model_files.tokenizer.chat_template import ChatTemplate
from paceline.models.loading.load import open_checkpoint
from paceline.tools.inflate.inflate import write_folder

PACELINE = """
import json, resource, sys, time
from paceline import LLM, SamplingParams
job = json.load(sys.stdin)
llm = LLM(job["model"], draft=job["draft"], activations=job["activations"], prefix_caching=False, max_num_seqs=8)
sampling = SamplingParams(max_tokens=job["tokens"], ignore_eos=True, **job["sampling"])

def run(count, enabled):
    started = time.perf_counter()
    prompts = job["prompts"][:count]
    generations = llm.generate(prompts, sampling, speculation={"enabled": enabled})
    return time.perf_counter() - started, [g.completions[0].token_ids for g in generations]

result = {}
for count in (1, 8):
    run(count, False), run(count, True)
    off, on = [], []
    for _ in range(job["repeats"]):  # in turns, so that load affects both
        seconds, plain = run(count, False)
        off.append(seconds)
        seconds, speculative = run(count, True)
        on.append(seconds)
        assert plain == speculative, "speculation changed the text"
    name = "paceline" if job["activations"] == "int8" else "paceline, float32 activations"
    result[f"{name}, plain/{count}"], result[f"{name}, speculation on/{count}"] = off, on
llm.close()
result["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
json.dump(result, sys.stdout)
"""

TRANSFORMERS = """
import json, sys, time, warnings
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
warnings.simplefilter("ignore")
job = json.load(sys.stdin)
path = Path(job["model"])
model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
result = {}
for count in (1, 8):
    prompts = job["prompts"][:count]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    times = []
    for _ in range(max(2, job["repeats"] // 3)):
        started = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, max_new_tokens=job["tokens"], min_new_tokens=job["tokens"],
                           do_sample=False, pad_token_id=0)
        times.append(time.perf_counter() - started)
    result[f"transformers.generate, float32/{count}"] = times
json.dump(result, sys.stdout)
"""

LLAMA_CPP = """
import json, sys, time
from llama_cpp import Llama
job = json.load(sys.stdin)
llm = Llama(job["model"], n_ctx=2048, n_threads=job["threads"], n_threads_batch=job["threads"], verbose=False)
times = []
for _ in range(job["repeats"] + 1):
    llm.reset()
    started = time.perf_counter()
    for number, token in enumerate(llm.generate(job["prompts"][0], top_k=1, temp=0.0), start=1):
        if number == job["tokens"]:
            break
    times.append(time.perf_counter() - started)
json.dump({"llama.cpp, Q4_1 with 8-bit activations/1": times[1:]}, sys.stdout)
"""

VLLM = """
import json, os, sys, time
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
os.environ.update(OMP_NUM_THREADS=str(os.cpu_count()), HF_HUB_OFFLINE="1")
from vllm import LLM, SamplingParams
job = json.load(sys.stdin)
llm = LLM(job["folder"], dtype="float32", max_model_len=2048, max_num_seqs=8, enable_prefix_caching=False,
          kv_cache_memory_bytes=1 << 30)
sampling = SamplingParams(max_tokens=job["tokens"], temperature=0.0, ignore_eos=True)
result = {}
for count in (1, 8):
    times = []
    for _ in range(max(2, job["repeats"] // 3) + 1):
        started = time.perf_counter()
        llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"][:count]], sampling, use_tqdm=False)
        times.append(time.perf_counter() - started)
    result[f"vLLM, float32/{count}"] = times[1:]
json.dump(result, answer)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prompts", type=Path, required=True, help="spec_bench_dev.jsonl, see benchmarks/gpu/README.md"
    )
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--draft", default="smollm2-eagle", help="draft of `speculation on`; none: ngram")
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--llama-cpp", metavar="PYTHON")
    parser.add_argument("--vllm", metavar="PYTHON")
    options = parser.parse_args()
    path = find_model("smollm2")
    prompts = chats(path, options.prompts)
    lengths = sorted(map(len, prompts))
    print(f"{cpu_name()}, {usable_cores()} cores; {len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens")
    print(f"{options.tokens} new tokens each", flush=True)
    job = {
        "model": str(path),
        "draft": options.draft,
        "prompts": prompts,
        "tokens": options.tokens,
        "repeats": options.repeats,
        "sampling": {"temperature": 0.2, "top_p": 0.9, "seed": 1} if options.sampled else {"temperature": 0.0},
        "threads": os.cpu_count(),
    }
    results = run_engine(sys.executable, PACELINE, {**job, "activations": "int8"})
    memory = results.pop("memory")
    if not options.sampled:
        results |= run_engine(sys.executable, PACELINE, {**job, "activations": "float32"})
        del results["memory"]
        results |= run_engine(sys.executable, TRANSFORMERS, job)
    if options.llama_cpp:
        results |= run_engine(options.llama_cpp, LLAMA_CPP, job)
    if options.vllm:
        with tempfile.TemporaryDirectory() as folder:
            write_folder(open_checkpoint(path), Path(folder, "model"))
            results |= run_engine(options.vllm, VLLM, {**job, "folder": f"{folder}/model"})
    rates = {}
    for key, times in results.items():
        name, count = key.split("/")
        rates[name, int(count)] = int(count) * options.tokens / statistics.median(times)
    print(f"{'engine':42} {'batch':>5} {'tokens/s':>9} {'paceline plain /':>20}")
    for (name, count), rate in sorted(rates.items(), key=lambda item: item[0][1]):
        print(f"{name:42} {count:5} {rate:9.1f} {rates['paceline, plain', count] / rate:19.2f}x")
    for count in (1, 8):
        off, on = results[f"paceline, plain/{count}"], results[f"paceline, speculation on/{count}"]
        pairs = sorted(a / b for a, b in zip(off, on, strict=True))
        print(
            f"speculation / plain, batch {count}: {statistics.median(off) / statistics.median(on):.2f} by medians, "
            f"{pairs[0]:.2f} to {pairs[-1]:.2f} over {len(pairs)} pairs of runs"
        )
    print(f"largest resident memory, 8 streams: {memory:.2f} GB")


def chats(model: Path, prompts: Path) -> list[list[int]]:
    tokenizer = open_checkpoint(model).read_tokenizer()
    template = ChatTemplate.of(tokenizer)
    texts = [json.loads(line)["turns"][0] for line in prompts.read_text().splitlines()]
    texts = [text for text in texts if len(text) < 1200]
    texts = texts[:: len(texts) // 8][:8]
    return [tokenizer.encode(template.render([{"role": "user", "content": text}]), add_special=False) for text in texts]


def run_engine(python: str, program: str, job: dict[str, object]) -> dict[str, list[float]]:
    answer = subprocess.run([python, "-c", program], input=json.dumps(job), capture_output=True, text=True)
    if answer.returncode:
        sys.exit(f"{python} ended with {answer.returncode}: {answer.stderr[-2000:]}")
    return json.loads(answer.stdout)


if __name__ == "__main__":
    main()

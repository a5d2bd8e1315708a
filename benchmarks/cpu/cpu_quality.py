"""Effect of rounded activations on quality: perplexity, and how often the most likely token is that of float32 activations.

    python benchmarks/cpu/cpu_quality.py --prompts spec_bench_dev.jsonl [--texts 50] [--tokens 128] [--llama-cpp PYTHON]

The texts are prompts of spec_bench_dev.jsonl in the chat template of the model, cut to `--tokens`.
"""

import argparse
import json
import math
import subprocess
from pathlib import Path

import torch

from paceline.core.machine import cpu_name
from paceline.models.loading.hub import find_model
from paceline.models.loading.load import load_model
from paceline.models.runner import ModelRunner, Span
from paceline.models.tokenizer.chat_template import ChatTemplate

LLAMA_CPP = """
import json, sys
import numpy
from llama_cpp import Llama
job = json.load(sys.stdin)
llm = Llama(job["model"], n_ctx=2048, n_batch=1024, logits_all=True, verbose=False)
nll, tops = 0.0, []
for ids in job["texts"]:
    llm.reset()
    llm.eval(ids)
    scores = numpy.array(llm.scores[: len(ids) - 1], dtype=numpy.float64)
    scores -= scores.max(1, keepdims=True)
    logs = scores - numpy.log(numpy.exp(scores).sum(1, keepdims=True))
    nll -= logs[numpy.arange(len(ids) - 1), ids[1:]].sum()
    tops.append(scores.argmax(1).tolist())
json.dump([nll, tops], sys.stdout)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prompts", type=Path, required=True, help="spec_bench_dev.jsonl, see benchmarks/engine/README.md"
    )
    parser.add_argument("--texts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--llama-cpp", metavar="PYTHON")
    options = parser.parse_args()
    tokenizer = load_model("smollm2").tokenizer
    template = ChatTemplate.of(tokenizer)
    prompts = [json.loads(line)["turns"][0] for line in options.prompts.read_text().splitlines()]
    prompts = prompts[:: max(1, len(prompts) // options.texts)][: options.texts]
    chats = [template.render([{"role": "user", "content": text}]) for text in prompts]
    texts = [tokenizer.encode(chat, add_special=False)[: options.tokens] for chat in chats]
    results = {name: score(texts, name) for name in ("float32", "int8")}
    if options.llama_cpp:
        job = json.dumps({"model": str(find_model("smollm2")), "texts": texts})
        done = subprocess.run(
            [options.llama_cpp, "-c", LLAMA_CPP], input=job, capture_output=True, text=True, check=True
        )
        results["llama.cpp"] = tuple(json.loads(done.stdout))
    count = sum(len(ids) - 1 for ids in texts)
    reference = [token for tops in results["float32"][1] for token in tops]
    print(f"{len(texts)} texts, {count} predicted tokens, {cpu_name()}")
    print("| activations | perplexity | same most likely token as float32 |\n|---|---|---|")
    for name, (nll, tops) in results.items():
        same = sum(a == b for a, b in zip(reference, (token for one in tops for token in one), strict=True))
        print(f"| {name} | {math.exp(nll / count):.3f} | {100 * same / count:.2f}% |")


@torch.inference_mode()
def score(texts: list[list[int]], activations: str) -> tuple[float, list[list[int]]]:
    """Negative log-likelihood of all tokens, and the most likely token at every position."""
    runner = ModelRunner(load_model("smollm2", activations=activations).model, 80)  # type: ignore[arg-type]
    nll, tops = 0.0, []
    for ids in texts:
        logits = runner.forward([Span(list(range(1, 2 + len(ids) // 16)), 0, ids, len(ids))]).logits
        assert logits is not None
        logs = logits[:-1].double().log_softmax(-1)
        nll -= float(logs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].sum())
        tops.append(logits[:-1].argmax(-1).tolist())
    return nll, tops


if __name__ == "__main__":
    main()

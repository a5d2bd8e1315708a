"""Log-probabilities of decoding, with drafts and in batches, compared with those of one scoring pass over each finished text.

    python benchmarks/exactness/logprobs.py                                   # the embedded model, with its draft
    python benchmarks/exactness/logprobs.py --model DIR --draft DIR --device cuda --tokens 128
    python benchmarks/exactness/logprobs.py --url http://127.0.0.1:8000       # a running server, by `echo`

Prints the largest difference, and exits with 1 if it is not 0.
"""

import argparse
import json
import os
import sys
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams

TOPICS = ("rivers", "prime numbers", "bread", "sorting a list", "the moon", "tax law", "chess openings", "jazz")


@dataclass(frozen=True)
class Decoded:
    """A sampled text with the log-probabilities that were reported while it was decoded."""

    prompt: Sequence[int]
    output: Sequence[int]
    logprobs: Sequence[float]


Score = Callable[[Sequence[Sequence[int]]], list[list[float]]]
"""Log-probabilities of all tokens but the first, of several texts."""


def prompts(count: int, path: Path | None) -> list[str]:
    """The first lines of a file, or made-up ones."""
    if path is not None:
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()[:count]]
        return [row.get("prompt") or row.get("question") or row["turns"][0] for row in rows]
    return [f"Write {5 + i} sentences about {TOPICS[i % len(TOPICS)]}." for i in range(count)]


def of_engine(options: argparse.Namespace, texts: Sequence[str], llm: LLM) -> tuple[list[Decoded], Score]:
    sampling = [
        SamplingParams(temperature=options.temperature, seed=i, max_tokens=options.tokens, logprobs=0, ignore_eos=True)
        for i in range(len(texts))
    ]
    decoded, drafted, accepted = [], 0, 0
    for generation in llm.generate(list(texts), sampling):
        (choice,) = generation.completions
        drafted += choice.speculation.num_draft_tokens
        accepted += choice.speculation.num_accepted_draft_tokens
        values = [entry.logprob for entry in choice.logprobs or ()]
        decoded.append(Decoded(generation.prompt_token_ids, choice.token_ids, values))
    print(f"{drafted} tokens drafted, {accepted} accepted; system fingerprint {llm.system_fingerprint}")

    def score(ids: Sequence[Sequence[int]]) -> list[list[float]]:
        one_pass = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        found = llm.generate([list(text) for text in ids], one_pass)
        return [[entry.logprob for entry in generation.prompt_logprobs or ()] for generation in found]

    return decoded, score


def of_server(options: argparse.Namespace, texts: Sequence[str]) -> tuple[list[Decoded], Score]:
    def post(body: dict[str, Any]) -> dict[str, Any]:
        headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ.get('PACELINE_KEY', '')}"}
        request = urllib.request.Request(f"{options.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def decode(number: int) -> tuple[Decoded, dict[str, Any]]:
        body = {"prompt": texts[number], "max_tokens": options.tokens, "temperature": options.temperature}
        answer = post({**body, "seed": number, "logprobs": 0, "return_token_ids": True, "ignore_eos": True})
        choice = answer["choices"][0]
        found = Decoded(choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"]["token_logprobs"])
        return found, answer

    def score(ids: Sequence[Sequence[int]]) -> list[list[float]]:
        body = {"echo": True, "logprobs": 0, "max_tokens": 0, "temperature": 0}
        with ThreadPoolExecutor(options.batch) as pool:
            answers = pool.map(lambda text: post({**body, "prompt": list(text)}), ids)
            return [answer["choices"][0]["logprobs"]["token_logprobs"][1:] for answer in answers]

    with ThreadPoolExecutor(options.batch) as pool:
        decoded, answers = zip(*pool.map(decode, range(len(texts))), strict=True)
    counts = [answer["metrics"]["speculative_decoding"] for answer in answers]
    drafted, accepted = (sum(c[name] for c in counts) for name in ("num_draft_tokens", "num_accepted_draft_tokens"))
    fingerprints = {answer["system_fingerprint"] for answer in answers}
    print(f"{drafted} tokens drafted, {accepted} accepted; system fingerprint {', '.join(map(str, fingerprints))}")
    return list(decoded), score


def compare(decoded: Sequence[Decoded], score: Score, batch: int) -> bool:
    """Print the differences. True if there are none."""
    count, wrong, largest = 0, 0, 0.0
    for start in range(0, len(decoded), batch):
        part = decoded[start : start + batch]
        scored = score([[*text.prompt, *text.output] for text in part])
        for text, values in zip(part, scored, strict=True):
            own = values[len(text.prompt) - 1 :]
            gaps = [abs(a - b) for a, b in zip(text.logprobs, own, strict=True)]
            count, wrong, largest = count + len(gaps), wrong + sum(gap > 0 for gap in gaps), max(largest, *gaps, 0.0)
    print(f"{len(decoded)} texts, {count} log-probabilities, {wrong} differ, largest difference {largest:g}")
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running server; without it, the engine runs in this process")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--method", help="the default is that of the draft")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--depth", type=int, default=4, help="drafted tokens of a round")
    parser.add_argument("--prompts", type=Path, help="JSON lines with `prompt`, `question` or `turns`")
    parser.add_argument("--count", type=int, default=64, help="texts")
    parser.add_argument("--batch", type=int, default=64, help="sequences that run at once")
    parser.add_argument("--tokens", type=int, default=32, help="output tokens of a text")
    parser.add_argument("--temperature", type=float, default=0.8)
    options = parser.parse_args()
    texts = prompts(options.count, options.prompts)
    if options.url is not None:
        decoded, score = of_server(options, texts)
        return 0 if compare(decoded, score, options.batch) else 1
    # The breaker would stop drafts that do not pay
    speculation = {"depth": "fixed", "max_depth": options.depth, "method": options.method, "breaker_rounds": 10**9}
    engine = {name: getattr(options, name) for name in ("draft", "device", "dtype", "quantization")}
    with LLM(options.model, max_num_seqs=options.batch, speculation=speculation, **engine) as llm:
        decoded, score = of_engine(options, texts, llm)
        # One text at a time: a scoring pass of another shape than the steps that decoded it
        return 0 if compare(decoded, score, 1) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Time from the submission of a request to its first token, with and without speculation, inside the engine's process.

    python benchmarks/gpu/first_token.py MODEL --draft DRAFT --prompts PROMPTS.jsonl

One request at a time. Pairs of requests with the same prompt take turns; the first eight pairs are not counted.
"""

import argparse
import json
import threading
import time
from pathlib import Path
from statistics import median

from paceline import LLM, SamplingParams
from paceline.core.output import OutputEvent

NUM_FIRST = 8
"""Pairs that are not counted."""


def first_token_seconds(llm: LLM, text: str, is_speculating: bool) -> float:
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    request = llm._request([{"role": "user", "content": text}], sampling, speculation={"enabled": is_speculating})
    heard, done = list[float](), threading.Event()

    def listen(event: OutputEvent) -> None:
        heard.append(time.perf_counter())
        if getattr(event, "finish_reason", "an error") is not None:
            done.set()

    began = time.perf_counter()
    llm._loop.submit(request, listen)
    done.wait()
    return heard[0] - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with a list `turns`")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--pairs", type=int, default=24)
    options = parser.parse_args()
    lines = options.prompts.read_text("utf-8").splitlines()[: NUM_FIRST + options.pairs]
    texts = [json.loads(line)["turns"][0][:4000] for line in lines]
    found: dict[bool, list[float]] = {False: [], True: []}
    limits = {"max_model_len": options.max_model_len, "prefix_caching": False, "audit_fraction": 0.0}
    with LLM(options.model, draft=options.draft, **limits) as llm:
        llm.warm_up()
        llm.finish_idle_work()
        for number, text in enumerate(texts):
            for is_speculating in (False, True) if number % 2 else (True, False):
                seconds = first_token_seconds(llm, text, is_speculating)
                if number >= NUM_FIRST:
                    found[is_speculating].append(1e3 * seconds)
    difference = median(drafting - plain for plain, drafting in zip(found[False], found[True], strict=True))
    print("| plain, ms | speculating, ms | median of the differences |\n|---|---|---|")
    print(f"| {median(found[False]):.2f} | {median(found[True]):.2f} | {difference:.2f} |")


if __name__ == "__main__":
    main()

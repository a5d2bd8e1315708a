"""Tokens per round of an EAGLE head whose prompt is in the prefix cache, with and without hidden states of the prompt.

    python benchmarks/drafts/cached_states.py --prompts spec_bench_dev.jsonl [--count 13] [--tokens 64]

Every prompt is answered once, greedily, so that its blocks are cached: with speculation, without it, or not at all. Then it is
answered with the head, which drafts `--nodes` tokens in every round. The text is the same each time.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from paceline import LLM, SamplingParams

NEVER = 2**31
"""Rounds before the circuit breaker opens: every round drafts."""
FIRST = {
    "none: the prompt is not cached": None,
    "one with the same head": True,
    "one without speculation": False,
}
"""Requests that compute the prompt's blocks before the measured one, and whether they speculate."""


def tokens_per_round(llm: LLM, prompts: Sequence[str], tokens: int, first: bool | None, salt: str) -> float:
    """Tokens per round over all prompts. `salt` keeps the blocks of this measurement from the others."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    num_rounds = 0
    for text in prompts:
        messages = [{"role": "user", "content": text}]
        if first is not None:
            llm.chat(messages, sampling, speculation={"enabled": first}, cache_salt=salt)
        figures = llm.chat(messages, sampling, cache_salt=salt).completions[0].speculation
        # The prefill adds one token, and every round the accepted ones and one more
        num_rounds += tokens - 1 - figures.num_accepted_draft_tokens
    return len(prompts) * (tokens - 1) / num_rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prompts", type=Path, required=True, help="spec_bench_dev.jsonl, see benchmarks/engine/README.md"
    )
    parser.add_argument("--count", type=int, default=13, help="prompts, spread over the file")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=8)
    options = parser.parse_args()
    texts = [json.loads(line)["turns"][0] for line in options.prompts.read_text("utf-8").splitlines()]
    chosen = texts[:: len(texts) // options.count][: options.count]
    speculation = {"depth": "fixed", "max_depth": options.nodes, "breaker_rounds": NEVER}
    print("| request that computed the prompt before | tokens per round |\n|---|---|")
    with LLM("smollm2", draft="smollm2-eagle", device="cpu", audit_fraction=0.0, speculation=speculation) as llm:
        for name, first in FIRST.items():
            print(f"| {name} | {tokens_per_round(llm, chosen, options.tokens, first, name):.2f} |", flush=True)


if __name__ == "__main__":
    main()

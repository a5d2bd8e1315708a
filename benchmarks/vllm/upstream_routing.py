"""Time to first token of prompts with shared prefixes, through gateways with different routers over the same servers.

python benchmarks/vllm/upstream_routing.py --gateways kv_aware=http://127.0.0.1:8000,round_robin=http://127.0.0.1:8001

The gateways take turns. Each turn has new prefixes, and every prefix is asked about several times, in random order.
"""

import argparse
import random
import time
from statistics import fmean, median
from typing import NamedTuple

import httpx

WORDS = "river stone cloud market garden winter letter bridge candle forest island mirror engine harbour meadow".split()  # noqa: SIM905


class Answer(NamedTuple):
    """The first token of a prompt."""

    is_first: bool
    """Whether no request before it had this prefix."""
    seconds: float


def ttft(client: httpx.Client, url: str, prompt: str) -> float:
    """Seconds to the first chunk of a stream, which is read to its end."""
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True}
    began, seconds = time.perf_counter(), None
    with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and seconds is None:
                seconds = time.perf_counter() - began
    if seconds is None:
        raise RuntimeError(f"no token from {url}: {response.status_code}")
    return seconds


def one_turn(client: httpx.Client, url: str, seed: str, args: argparse.Namespace) -> list[Answer]:
    rng = random.Random(seed)
    prefixes = [" ".join(rng.choices(WORDS, k=args.words)) for _ in range(args.prefixes)]
    answers = []
    for visit in range(args.visits):
        for prefix in rng.sample(prefixes, args.prefixes):
            answers.append(Answer(visit == 0, ttft(client, url, f"{prefix} Question {visit}:")))
    return answers


def cached_tokens(client: httpx.Client, server: str) -> tuple[float, float]:
    """Prompt tokens that a vLLM server has looked up in its prefix cache, and those that it found."""
    lines = client.get(f"{server}/metrics").text.splitlines()
    totals = [
        sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:prefix_cache_{name}_total"))
        for name in ("queries", "hits")
    ]
    return totals[0], totals[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateways", required=True, help="LABEL=URL,LABEL=URL")
    parser.add_argument("--servers", default="", help="URLs of the vLLM servers, for the hit rate of their caches")
    parser.add_argument("--prefixes", type=int, default=8)
    parser.add_argument("--visits", type=int, default=4)
    parser.add_argument("--words", type=int, default=300)
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    gateways = dict(pair.split("=", 1) for pair in args.gateways.split(","))
    servers = [url for url in args.servers.split(",") if url]
    answers: dict[str, list[Answer]] = {label: [] for label in gateways}
    counts = {label: [0.0, 0.0] for label in gateways}
    with httpx.Client(timeout=600) as client:
        for turn in range(args.turns):
            for label, url in gateways.items():
                before = [cached_tokens(client, server) for server in servers]
                answers[label] += one_turn(client, url, f"{label} {turn}", args)
                for server, (queries, hits) in zip(servers, before, strict=True):
                    now = cached_tokens(client, server)
                    counts[label][0] += now[0] - queries
                    counts[label][1] += now[1] - hits
    print(
        "| router | first visits, TTFT p50 ms | later visits, p50 | mean | min to max | prompt tokens from the cache |"
    )
    print("|---|---|---|---|---|---|")
    for label, found in answers.items():
        first, later = ([1e3 * one.seconds for one in found if one.is_first is is_first] for is_first in (True, False))
        share = f"{100 * counts[label][1] / counts[label][0]:.0f}%" if counts[label][0] else ""
        spread = f"{min(later):.0f} to {max(later):.0f}"
        print(f"| {label} | {median(first):.0f} | {median(later):.0f} | {fmean(later):.0f} | {spread} | {share} |")


if __name__ == "__main__":
    main()

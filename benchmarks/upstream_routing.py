"""Time to first token of conversations with shared beginnings, through a gateway with several servers.

python benchmarks/upstream_routing.py --gateway http://127.0.0.1:8000 --label kv_aware
"""

import argparse
import random
import statistics
import time

import httpx

WORDS = "river stone cloud market garden winter letter bridge candle forest island mirror engine harbour meadow".split()  # noqa: SIM905


def ttft(client: httpx.Client, url: str, prompt: str) -> float:
    """Seconds to the first chunk of a stream."""
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True}
    began = time.perf_counter()
    with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                return time.perf_counter() - began
    raise RuntimeError(f"no token from {url}: {response.status_code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gateway", required=True)
    parser.add_argument("--label", default="", help="also the seed of the texts, so that two runs share no cache")
    parser.add_argument("--prefixes", type=int, default=6)
    parser.add_argument("--visits", type=int, default=5)
    parser.add_argument("--words", type=int, default=300)
    args = parser.parse_args()
    rng = random.Random(args.label)
    prefixes = [" ".join(rng.choices(WORDS, k=args.words)) for _ in range(args.prefixes)]
    visits = [(i, visit) for visit in range(args.visits) for i in range(args.prefixes)]
    first, later = [], []
    with httpx.Client(timeout=600) as client:
        for i, visit in visits:
            seconds = ttft(client, args.gateway, f"{prefixes[i]} Question {visit}:")
            (first if visit == 0 else later).append(seconds)
    p50 = [1e3 * statistics.median(values) for values in (first, later)]
    print(f"{args.label}: TTFT p50 of first visits {p50[0]:.0f} ms, of later ones {p50[1]:.0f} ms")


if __name__ == "__main__":
    main()

"""Streams through a gateway whose target pool has servers of another engine, while one server is killed.

paceline serve --config cluster.yaml        # a pool with `engine: vllm` and two workers
python benchmarks/vllm/upstream_failover.py --gateway http://127.0.0.1:8000 --alone http://127.0.0.1:PORT --kill PID
"""

import argparse
import asyncio
import json
import os
import signal
import time
from typing import Any

import httpx

PROMPT = "Write a short story about animal number {}."


def body(number: int, max_tokens: int, **options: Any) -> dict[str, Any]:
    values = {"prompt": PROMPT.format(number), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {**values, "return_token_ids": True, **options}


async def alone(client: httpx.AsyncClient, url: str, number: int, max_tokens: int) -> tuple[list[int], str]:
    model = (await client.get(f"{url}/v1/models")).json()["data"][0]["id"]
    answer = await client.post(f"{url}/v1/completions", json=body(number, max_tokens, model=model))
    choice = answer.json()["choices"][0]
    return choice["token_ids"], choice["text"]


async def stream(
    client: httpx.AsyncClient, url: str, number: int, max_tokens: int, counts: dict[int, int]
) -> tuple[list[int], str]:
    ids, text = [], ""
    request = body(number, max_tokens, stream=True)
    async with client.stream("POST", f"{url}/v1/completions", json=request) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:  # a KeyError shows an error of the stream
                ids += choice["token_ids"]
                text += choice["text"]
                counts[number] = len(ids)
    return ids, text


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gateway", required=True)
    parser.add_argument("--alone", required=True, help="a server of the pool, for the texts to compare with")
    parser.add_argument("--kill", type=int, nargs="+", required=True, help="process ids of another server of the pool")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=900, limits=limits) as client:
        numbers, size = range(args.streams), args.max_tokens
        expected = await asyncio.gather(*(alone(client, args.alone, number, size) for number in numbers))
        counts: dict[int, int] = {}
        began = time.perf_counter()
        tasks = [asyncio.create_task(stream(client, args.gateway, number, size, counts)) for number in numbers]
        while sum(count >= 3 for count in counts.values()) < args.streams:
            await asyncio.sleep(0.01)
        for pid in args.kill:
            os.kill(pid, signal.SIGKILL)
        print(f"killed after {min(counts.values())} to {max(counts.values())} of {size} tokens")
        found = await asyncio.gather(*tasks)
    print(f"complete: {sum(len(ids) == size for ids, _ in found)} of {args.streams}")
    print(f"identical: {sum(a == b for a, b in zip(found, expected, strict=True))} of {args.streams}")
    print(f"seconds: {time.perf_counter() - began:.1f}")


if __name__ == "__main__":
    asyncio.run(main())

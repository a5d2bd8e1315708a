"""`paceline orchestrate` over two servers beside the target alone: text, tokens per round and time.

python benchmarks/vllm/endpoints.py --draft http://127.0.0.1:8001 --target http://127.0.0.1:8002 [--pool http://127.0.0.1:8003]

All ways take turns prompt by prompt. The text of a pool is compared too.
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from statistics import median
from typing import Generic, NamedTuple, TypeVar

from paceline import SamplingParams
from paceline.core.config import SpeculationConfig
from paceline.endpoints import Orchestrator
from paceline.endpoints.http_client import HttpClient, connect
from paceline.endpoints.orchestrator import Answer

T = TypeVar("T")
PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "The three primary colours are",
    "def fibonacci(n):",
    "Once upon a time there was a",
    "The largest planet of the solar system is",
    "To make a cup of tea, first",
    "In 1969, the first humans",
    "A triangle has three sides, and a square has",
    "The opposite of hot is",
    "Photosynthesis is the process by which",
    "My favourite season is",
    "The alphabet begins with the letters",
    "One, two, three, four,",
    "Dear Sir or Madam,",
    "The heart pumps blood",
    "import numpy as np\n\n",
    "The recipe needs flour, sugar and",
    "Rome was not built in",
    "The Pacific is the largest",
)


class Timed(NamedTuple, Generic[T]):
    """The result of one prompt."""

    result: T
    seconds: float


async def timed(call: Awaitable[T]) -> Timed[T]:
    began = time.perf_counter()
    return Timed(await call, time.perf_counter() - began)


class Texts:
    """The texts of a server that decodes by itself."""

    def __init__(self, client: HttpClient, model: str, max_tokens: int) -> None:
        self._client = client
        self._body = {"model": model, "max_tokens": max_tokens, "temperature": 0}

    async def text(self, prompt: str) -> str:
        return str((await self._client.post("/v1/completions", {**self._body, "prompt": prompt}))["choices"][0]["text"])


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--pool", help="a gateway with the same target and a draft pool, to compare times with")
    parser.add_argument("--concurrency", type=int, default=1, help="texts at the same time")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--depth", type=int, default=4)
    args = parser.parse_args()
    config = SpeculationConfig(depth="fixed", max_depth=args.depth)
    sampling = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    limit = asyncio.Semaphore(args.concurrency)
    async with AsyncExitStack() as stack:
        orchestrator = await stack.enter_async_context(Orchestrator.connect(args.draft, args.target, config=config))
        print(f"target: {orchestrator.target}, draft: {orchestrator.draft}")
        for check in orchestrator.checks:
            print(check)
        servers = {}
        for name, url in (("the target alone", args.target), ("the pool", args.pool)):
            if url:
                client = await stack.enter_async_context(connect(url))
                servers[name] = Texts(client, orchestrator.target.model, args.max_tokens)

        async def one(prompt: str) -> tuple[Timed[Answer], dict[str, Timed[str]]]:
            async with limit:
                answer = await timed(orchestrator.generate(prompt, sampling))
                return answer, {name: await timed(server.text(prompt)) for name, server in servers.items()}

        await one(PROMPTS[0])  # connections and caches
        found = await asyncio.gather(*map(one, PROMPTS))
    counts = [len(answer.result.token_ids) for answer, _ in found]
    rounds = sum(answer.result.rounds for answer, _ in found)
    same = [all(text.result == answer.result.text for text in texts.values()) for answer, texts in found]
    print(f"identical texts: {sum(same)} of {len(found)}")
    print(f"tokens per round: {sum(counts) / rounds:.2f} ({sum(counts)} tokens, {rounds} rounds)")
    times = {"two endpoints": [answer.seconds for answer, _ in found]}
    times |= {name: [texts[name].seconds for _, texts in found] for name in servers}
    for name, seconds in times.items():
        each = sorted(1e3 * one / count for one, count in zip(seconds, counts, strict=True))
        print(f"ms per token of {name}: median {median(each):.1f}, {each[0]:.1f} to {each[-1]:.1f}")
    for prompt, (answer, texts) in zip(PROMPTS, found, strict=True):
        for name, text in texts.items():
            if text.result != answer.result.text:
                print(f"{name} differs after {prompt!r}:\n  {answer.result.text!r}\n  {text.result!r}")


if __name__ == "__main__":
    asyncio.run(main())

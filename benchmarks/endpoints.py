"""`paceline orchestrate` over two servers beside the target alone: text, tokens per round and time.

python benchmarks/endpoints.py --draft http://127.0.0.1:8001 --target http://127.0.0.1:8002
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from paceline import SamplingParams
from paceline.core.config import SpeculationConfig
from paceline.endpoints import Orchestrator
from paceline.endpoints.http_client import connect

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


async def for_all(call: Callable[[str], Awaitable[T]], concurrency: int) -> tuple[list[T], float]:
    """The results of all prompts, and the seconds they took."""
    limit = asyncio.Semaphore(concurrency)

    async def one(prompt: str) -> T:
        async with limit:
            return await call(prompt)

    began = time.perf_counter()
    return list(await asyncio.gather(*map(one, PROMPTS))), time.perf_counter() - began


async def plain(url: str, model: str, max_tokens: int, concurrency: int) -> tuple[list[str], float]:
    """The target's own texts."""
    async with connect(url) as client:

        async def text(prompt: str) -> str:
            body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
            return str((await client.post("/v1/completions", body))["choices"][0]["text"])

        return await for_all(text, concurrency)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--concurrency", type=int, default=1, help="texts at the same time")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--depth", type=int, default=4)
    args = parser.parse_args()
    config = SpeculationConfig(depth="fixed", max_depth=args.depth)
    sampling = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    async with Orchestrator.connect(args.draft, args.target, config=config) as orchestrator:
        print(f"target: {orchestrator.target}, draft: {orchestrator.draft}")
        for check in orchestrator.checks:
            print(check)
        model = orchestrator.target.model
        texts, plain_seconds = await plain(args.target, model, args.max_tokens, args.concurrency)
        answers, seconds = await for_all(lambda prompt: orchestrator.generate(prompt, sampling), args.concurrency)
    tokens, rounds = sum(len(answer.token_ids) for answer in answers), sum(answer.rounds for answer in answers)
    same = sum(answer.text == text for answer, text in zip(answers, texts, strict=True))
    print(f"identical texts: {same} of {len(texts)}")
    print(f"tokens per round: {tokens / rounds:.2f} ({tokens} tokens, {rounds} rounds)")
    print(f"ms per token: {1e3 * seconds / tokens:.1f}, of the target alone {1e3 * plain_seconds / tokens:.1f}")
    for prompt, answer, text in zip(PROMPTS, answers, texts, strict=True):
        if answer.text != text:
            print(f"differs after {prompt!r}:\n  {answer.text!r}\n  {text!r}")


if __name__ == "__main__":
    asyncio.run(main())

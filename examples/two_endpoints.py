"""Speculative decoding over two servers: one drafts, the other verifies. The text is that of the target alone.

paceline serve --port 8001 & paceline serve --port 8002 &
python examples/two_endpoints.py http://127.0.0.1:8001 http://127.0.0.1:8002
"""

import asyncio
import sys

from paceline.core.request import SamplingParams
from paceline.tools.orchestrate.orchestrator import Orchestrator

QUESTIONS = ("Why is the sky blue?", "Name the planets of the solar system.")


async def main(draft: str, target: str) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=64)
    async with Orchestrator.connect(draft, target) as orchestrator:
        for check in orchestrator.checks:
            print(check)
        for question in QUESTIONS:
            answer = await orchestrator.generate([{"role": "user", "content": question}], sampling)
            print(f"\n{answer.text}\n{len(answer.token_ids)} tokens in {answer.rounds} rounds")


if __name__ == "__main__":
    urls = sys.argv[1:3] if len(sys.argv) > 2 else ["http://127.0.0.1:8000"] * 2
    asyncio.run(main(*urls))

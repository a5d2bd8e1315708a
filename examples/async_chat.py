"""Conversations side by side in one event loop. Their requests share one batch; each keeps its own history.

python examples/async_chat.py
"""

import asyncio

from paceline.core.request import SamplingParams
from paceline.engine.start.llm import LLM

QUESTIONS = {
    "ann": ["Name a fruit.", "Name another one."],
    "ben": ["What is two plus three?", "And one more?"],
    "eve": ["Say hello in French.", "And in Spanish?"],
}


async def converse(llm: LLM, name: str, questions: list[str]) -> None:
    history: list[dict[str, str]] = []
    for question in questions:
        history.append({"role": "user", "content": question})
        answer = await llm.achat(history, SamplingParams(temperature=0, max_tokens=24))
        history.append({"role": "assistant", "content": answer.text})
        print(f"{name}: {question} -> {answer.text.strip()}")


async def main() -> None:
    with LLM("smollm2") as llm:
        await asyncio.gather(*(converse(llm, name, questions) for name, questions in QUESTIONS.items()))


if __name__ == "__main__":
    asyncio.run(main())
